"""Save a model and its tokenizer, so that transformers 4 and 5 read what was saved."""

import json
from pathlib import Path

from runtime.cli import say


def export(model, tokenizer, directory: str | Path) -> None:
    """Save both in a directory that transformers 4 and 5 read as the same model. Many servers still
    use 4. It looks for the settings of RoPE at the top of config.json, and takes a base of 10,000
    without a word if there is none. 5 finds them there, too, so they are written nowhere else. 4
    knows neither what 5 calls some settings (num_experts) and tokenizer classes, nor 5's list of
    special tokens."""
    # Where a file has two different matrices, the library does not tie them, whatever config.json
    # says. Servers would believe it.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for_4 = {name: getattr(model.config, name) for name in model.config.attribute_map}
    scaling = dict(getattr(model.config, "rope_parameters", None) or {})
    scaling = scaling.get("full_attention", scaling)  # of all layers, if kinds have their own
    for name in "rope_theta", "partial_rotary_factor":
        if name in scaling:
            for_4[name] = scaling.pop(name)
    if scaling.get("rope_type", "default") != "default":
        for_4["rope_scaling"] = scaling
        if model.config.model_type == "nemotron":  # of which 4 scales no RoPE
            say(f"{directory}: only transformers 5 reads the scaling of its RoPE ({scaling})")
    add_to_json(Path(directory) / "config.json", for_4)
    for_4 = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads all of tokenizer.json, also in 5
        "additional_special_tokens": tokenizer.extra_special_tokens,
        "extra_special_tokens": {},  # a dict in 4
    }
    add_to_json(Path(directory) / "tokenizer_config.json", for_4)
    # The mode that the umask gives, as config.json has it. safetensors keeps others from reading.
    for path in Path(directory).glob("*.safetensors"):
        path.chmod(path.with_name("config.json").stat().st_mode)


def add_to_json(path, entries):
    content = json.loads(path.read_text(encoding="utf-8")) | entries
    content.pop("rope_parameters", None)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
