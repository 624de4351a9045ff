"""Save a model and its tokenizer, so that transformers 4 and 5 read what was saved."""

import json
from pathlib import Path


def export(model, tokenizer, directory: str | Path) -> None:
    """Save both in a directory that transformers 4 and 5 read as the same model. Many servers still
    use 4. It looks for the settings of RoPE at the top of config.json, and takes a base of 10,000
    without a word if there is none. It knows neither what 5 calls some settings (num_experts) and
    tokenizer classes, nor 5's list of special tokens."""
    # Where a file has two different matrices, the library does not tie them, whatever config.json
    # says. Servers would believe it.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for_4 = {name: getattr(model.config, name) for name in model.config.attribute_map}
    scaling = dict(getattr(model.config, "rope_parameters", None) or {})
    for name in "rope_theta", "partial_rotary_factor":
        if name in scaling:
            for_4[name] = scaling.pop(name)
    if scaling.get("rope_type", "default") != "default":
        for_4["rope_scaling"] = scaling
    add_to_json(Path(directory) / "config.json", for_4)
    for_4 = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads all of tokenizer.json, also in 5
        "additional_special_tokens": tokenizer.extra_special_tokens,
        "extra_special_tokens": {},  # a dict in 4
    }
    add_to_json(Path(directory) / "tokenizer_config.json", for_4)


def add_to_json(path, entries):
    content = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
