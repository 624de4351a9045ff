r"""Train in TRL with CER, or with the overlap of words, as the reward function of RLOOTrainer, or
of GRPOTrainer with --grpo.

    pip install -r requirements-dev.txt
    python examples/trl_cer.py                      # the toy, on a CPU
    python examples/trl_cer.py --reward overlap
    python examples/trl_cer.py --model Qwen/Qwen3-0.6B-Base --dataset math7.5k \
        --questions 8 --samples 8 --max-new-tokens 1024

    python evaluate.py --model runs/trl/model --dataset toy-test \
        --temperature 1 --top-p 1 --top-k 0 --max-new-tokens 32

In a script of your own, copy `cer_rewards` below, cer.py and engine/tokens.py, or `overlap_rewards`
and what it calls, which needs no model. docs/extending.md ("In your own trainer") lists the
conditions under which the rewards are the paper's. TRL checks none of them. `cer_rewards` checks
that a rank has all samples of a question and that the weights are whole. `load` checks the model
and drops the generation settings that it brings from the hub.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers.integrations import is_deepspeed_zero3_enabled

try:
    from accelerate import PartialState
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
except ModuleNotFoundError:
    sys.exit("trl_cer.py needs TRL: pip install -r requirements-dev.txt")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository's modules


import cer  # noqa: E402
from engine.checks import check_sampling  # noqa: E402
from engine.load import load  # noqa: E402
from engine.tokens import vocabulary  # noqa: E402
from reward_functions import f1  # noqa: E402
from runtime import cli  # noqa: E402
from tasks import toy_model  # noqa: E402
from tasks.data import load_problems  # noqa: E402
from tasks.prompts import chat_messages, usable_prompts  # noqa: E402
from tasks.verifiers import words  # noqa: E402


def cer_rewards(trainer, prompts, completion_ids, references):
    """The reward of each sample. The lists are those that TRL passes to a reward function, with one
    entry per sample. The N samples of a question are neighbours."""
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():
        raise ValueError("the policy is sharded, but CER needs the whole model on every rank")
    model, tokenizer = trainer.model, trainer.processing_class
    judge = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
    training, rewards = model.training, []
    N = trainer.num_generations if training else trainer.num_generations_eval
    template = {"add_generation_prompt": True, "return_dict": False, **trainer.chat_template_kwargs}
    model.eval()
    for i in range(0, len(prompts), N):
        if prompts[i : i + N] != [prompts[i]] * N:
            raise ValueError(
                "a rank has only some of a question's samples: per_device_train_batch_size x "
                f"steps_per_generation must be a multiple of num_generations, {N}"
            )
        prompt_ids = tokenizer.apply_chat_template(prompts[i], **template)
        with trainer.accelerator.autocast():  # as in sampling
            group = completion_ids[i : i + N]
            R, _ = cer.rewards(judge, tokenizer, prompt_ids, group, references[i])
        rewards += R.tolist()
    model.train(training)
    return rewards


def overlap_rewards(tokenizer, completion_ids, references):
    """For each sample the token F1 of SQuAD between its answer, which is in the last box, and the
    reference that fits best. One entry per sample in each list."""
    vocab, rewards = vocabulary(tokenizer), []
    for ids, of_question in zip(completion_ids, references):
        box = vocab.locate_answer(ids)
        answer = words(box.answer if box else "")
        rewards.append(max(f1(answer, words(reference)) for reference in of_question))
    return rewards


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", help="Hugging Face id or directory (default: the toy's, made here)")
    add("--dataset", default="toy", help="a name or a file, as for train.py")
    add("--reward", default="cer", choices=["cer", "overlap"])
    for name in "questions", "samples", "max_new_tokens", "steps":
        flag = f"--{name.replace('_', '-')}"
        add(
            flag,
            type=int,
            default=toy_model.FLAGS[name],
            help="as for train.py",
        )
    add("--seed", type=int, default=0)
    add("--grpo", action="store_true", help="use GRPOTrainer instead of RLOOTrainer")
    add("--out", default="runs/trl", help="directory for the trained model")
    args, gpu = parser.parse_args(), torch.cuda.is_available()
    ranks = PartialState(cpu=not gpu)
    B, N, lr = args.questions, args.samples, 1e-6 if args.model else toy_model.LEARNING_RATE["lr"]
    cli.require(B % ranks.num_processes == 0, "--questions must be a multiple of the ranks")
    if not args.model:
        torch.set_num_threads(1)  # as toy_model.make_model does
        args.model = f"{args.out}/warm-start"
        if ranks.is_main_process:
            toy_model.warm_start(args.model, args.seed)
        ranks.wait_for_everyone()
    # In fp32; the trainer moves it to its device.
    model, tokenizer = load(args.model, "cpu", check_sampling, cer.check_scoring)
    beyond = list(range(model.tokenizer_size, model.get_input_embeddings().weight.shape[0]))
    problems = load_problems(args.dataset)
    problems, _ = usable_prompts(model, tokenizer, problems, args.dataset, args.max_new_tokens)
    rows = [{"prompt": chat_messages(p), "reference": p.references} for p in problems]
    Config, Trainer = (GRPOConfig, GRPOTrainer) if args.grpo else (RLOOConfig, RLOOTrainer)
    config = Config(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        generation_kwargs={"suppress_tokens": beyond or None},
        num_generations=N,
        max_completion_length=args.max_new_tokens,
        per_device_train_batch_size=N,  # one question per micro-batch
        gradient_accumulation_steps=B // ranks.num_processes,
        learning_rate=lr,
        lr_scheduler_type="polynomial",  # with power 1 linear, as in train.py
        lr_scheduler_kwargs={"power": 1.0, "lr_end": lr * toy_model.LEARNING_RATE["lr_end"]},
        max_steps=args.steps,
        seed=args.seed,
        use_cpu=not gpu,
        bf16=gpu,
        output_dir=args.out,
        save_strategy="no",
        report_to="none",
    )
    if args.grpo:
        config.scale_rewards, config.loss_type = "none", "dr_grpo"

    def cer_reward(prompts, completion_ids, reference, **others):
        return cer_rewards(trainer, prompts, completion_ids, reference)

    def overlap_reward(completion_ids, reference, **others):
        return overlap_rewards(tokenizer, completion_ids, reference)

    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs={"cer": cer_reward, "overlap": overlap_reward}[args.reward],
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    trainer.save_model(f"{args.out}/model")


if __name__ == "__main__":
    cli.run_script(main)
