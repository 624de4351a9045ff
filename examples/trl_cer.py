r"""Train in TRL with VeriFree, with CER, or with the overlap of words. VeriFree is a trainer, a
subclass of GRPOTrainer. CER and the overlap are reward functions of RLOOTrainer, or of GRPOTrainer
with --grpo.

    pip install -r requirements-dev.txt
    python examples/trl_cer.py --reward verifree    # the toy, on a CPU
    python examples/trl_cer.py --reward overlap
    python examples/trl_cer.py --model Qwen/Qwen3-0.6B-Base --dataset math7.5k --lora 32 \
        --reward verifree --questions 8 --samples 8 --max-new-tokens 1024

    python evaluate.py --model runs/trl/model --dataset toy-test \
        --temperature 1 --top-p 1 --top-k 0 --max-new-tokens 32

For VeriFree or CER in a script of your own, copy cer.py, engine/tokens.py, the function
`leave_one_out` of rloo.py, and from this file the part that two lines mark, with its imports. Then

    config = GRPOConfig(**RULES, **GRPO_RULES, num_generations=8, ...)
    trainer = VeriFreeTrainer(model, config, processing_class=tokenizer, train_dataset=rows)

trains on rows that have a "prompt" and a "reference", a string or a list of wordings. It takes a
`peft_config` as GRPOTrainer does. For the overlap copy `overlap_rewards` and what it calls; it
needs neither a model nor a tokenizer.

docs/extending.md ("In your own trainer") lists the conditions under which the rewards are the
paper's. TRL checks none of them. `VeriFreeTrainer` refuses settings with which it would be another
method. Scoring refuses a rank that has only some samples of a question, and sharded weights. What
is not copied checks more: `load` checks the model, and drops the generation settings that it brings
from the hub.
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
from engine.export import export  # noqa: E402
from engine.load import load  # noqa: E402
from engine.lora import ALPHA  # noqa: E402
from engine.memory import linear_layers  # noqa: E402
from engine.tokens import pad, split_answer, vocabulary  # noqa: E402
from reward_functions import f1  # noqa: E402
from rloo import leave_one_out  # noqa: E402
from runtime import cli  # noqa: E402
from tasks import toy_model  # noqa: E402
from tasks.data import load_problems  # noqa: E402
from tasks.prompts import chat_messages, usable_prompts  # noqa: E402
from tasks.verifiers import words  # noqa: E402

# ------------------------------------------------------- VeriFree and CER: to copy, from this line

# What the method needs of TRL's settings: the model's own samples, used once, and no other loss.
RULES = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "beta": 0.0,  # RLOOConfig has .05
    "num_iterations": 1,
    "mask_truncated_completions": False,
    "disable_dropout": True,  # samples and scores have none
    "router_aux_loss_coef": 0.0,  # None takes the coefficient of a model with experts
}
# The same for GRPOConfig, whose loss can be rescaled, filtered and corrected in more ways.
GRPO_RULES = {
    "loss_type": "dr_grpo",  # divides by a constant, not by a completion's length
    "scale_rewards": "none",
    "multi_objective_aggregation": "sum_then_normalize",  # the other divides by the deviation
    "importance_sampling_level": "token",
    "delta": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None,
    "vllm_importance_sampling_correction": False,  # its ratios are those of the sampled tokens
}


def is_sharded(trainer):
    return trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled()


def score_groups(trainer, prompts, completion_ids, references):
    """W and P of each question -> a list of (the completions of its N samples, cer.Scores). The
    arguments are what TRL passes to a reward function: lists with one entry per sample, in which
    the N samples of a question are neighbours."""
    if is_sharded(trainer):
        raise ValueError("the weights are sharded, but scoring needs all of them on every rank")
    model, tokenizer = trainer.model, trainer.processing_class
    training, scored = model.training, []
    N = trainer.num_generations if training else trainer.num_generations_eval
    model.eval()
    for i in range(0, len(prompts), N):
        if prompts[i : i + N] != [prompts[i]] * N:
            raise ValueError(
                "a rank has only some of a question's samples: per_device_train_batch_size x "
                f"steps_per_generation must be a multiple of num_generations, {N}"
            )
        # TRL's own method, so that these are the ids after which it sampled.
        [prompt_ids], *_ = trainer._tokenize_prompts([prompts[i]])
        group = completion_ids[i : i + N]
        with trainer.accelerator.autocast():  # as in sampling
            _, scores = cer.rewards(model, tokenizer, prompt_ids, group, references[i])
        scored.append((group, scores))
    model.train(training)
    return scored


def cer_rewards(trainer, *of_samples):
    """CER of each sample. of_samples: see score_groups."""
    scored = score_groups(trainer, *of_samples)
    return [R for _, scores in scored for R in scores.R_of_samples().tolist()]


class VeriFreeTrainer(GRPOTrainer):
    """VeriFree in TRL. The reward of a sample is P_i = pi(a*|s_i). It is trained on its solution,
    followed by the reference in place of its own answer. The solution's tokens have the weight A_i,
    and the reference's P_i (the same as rloo.verifree_rows, which says why).

    GRPOTrainer samples, calls `verifree_reward`, and computes the loss, which takes one advantage
    per token. Between the two this class puts its own tokens and their weights into the batch. So
    the advantages that TRL logs are its own, and are not used: they are rewards minus the mean of
    all N, which is (N - 1) / N of A_i. Other rewards may be scaled by that factor, but here A_i has
    to keep its proportion to P_i.

    Raises ValueError for settings with which it would be another method."""

    def __init__(self, model, args, **options):
        for name, value in {**RULES, **GRPO_RULES}.items():
            if getattr(args, name) != value:
                raise ValueError(f"VeriFree needs {name}={value!r}, not {getattr(args, name)!r}")
        if others := sorted({*(args.generation_kwargs or {})} - {"suppress_tokens"}):
            raise ValueError(f"VeriFree takes only suppress_tokens in generation_kwargs: {others}")
        # Otherwise TRL needs the probabilities that the sampled tokens had before the step.
        if args.gradient_accumulation_steps % args.steps_per_generation:
            only_one = "VeriFree takes one optimizer step on its samples"
            divide = "steps_per_generation must divide gradient_accumulation_steps"
            raise ValueError(f"{only_one}: {divide}")
        super().__init__(model, self.verifree_reward, args, **options)

    def verifree_reward(self, prompts, completion_ids, reference, **others):
        """P of each sample. Keeps what it is trained on: ids, and a weight for each."""
        vocab, rewards, self.rows = vocabulary(self.processing_class), [], []
        for group, scores in score_groups(self, prompts, completion_ids, reference):
            P = scores.P_of_samples()
            rewards += P.tolist()
            if not self.model.training:  # an evaluation, perhaps with one sample per question
                continue
            A, references = leave_one_out(P), scores.sample_references()
            for i, (ids, A_i, P_i) in enumerate(zip(group, A.tolist(), P.tolist())):
                solution, answer = ids, []
                if box := vocab.locate_answer(ids):
                    solution = ids[: box.solution_length]
                    answer = vocab.encode("{" + references[i] + box.closing)
                weights = [A_i] * len(solution) + [P_i] * len(answer)
                self.rows.append((solution + answer, weights))
        return rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # calls verifree_reward
        if not self.model.training:
            return batch
        kept = {"prompt_ids", "prompt_mask", "num_items_in_batch", "sampling_per_token_logps"}
        ids, weights = zip(*self.rows)
        own = {
            "completion_ids": pad(ids),
            "completion_mask": pad([[1] * len(row) for row in ids]),
            # The loss of dr_grpo is divided by max_completion_length.
            "advantages": pad(weights) * self.max_completion_length,
        }
        if others := sorted(batch.keys() - kept - own.keys()):  # such as the mask of a tool's words
            raise ValueError(f"VeriFree replaces the sampled tokens, and cannot take {others}")
        return batch | {name: own[name].to(self.accelerator.device) for name in own}


# --------------------------------------------------------------------- VeriFree and CER: to here


def overlap_rewards(completions, references):
    """For each sample the token F1 of SQuAD between its answer, which is in the last box, and the
    reference that fits best. One entry per sample in each list. completions: texts or messages."""
    rewards = []
    for completion, of_question in zip(completions, references):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        _, answer = split_answer(text) or (None, "")
        rewards.append(max(f1(words(answer), words(reference)) for reference in of_question))
    return rewards


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", help="Hugging Face id or directory (default: the toy's, made here)")
    add("--dataset", default="toy", help="a name or a file, as for train.py")
    add("--reward", default="cer", choices=["cer", "verifree", "overlap"])
    for name in "questions", "samples", "max_new_tokens", "steps":
        number = cli.number(int, 2 if name == "samples" else 1)
        toys = toy_model.FLAGS[name]
        help = "as for train.py; the default is the toy's, with any model"
        add(f"--{name.replace('_', '-')}", type=number, default=toys, help=help)
    add("--lora", type=cli.number(int, 1), metavar="RANK", help="train adapters of peft")
    add("--lr", type=cli.number(float, 1e-12, 1), help="(default: as for train.py)")
    add("--seed", type=int, default=0)
    add("--grpo", action="store_true", help="GRPOTrainer for RLOOTrainer; verifree always uses it")
    add("--out", default="runs/trl", help="directory for the trained model")
    args, gpu = parser.parse_args(), torch.cuda.is_available()
    ranks = PartialState(cpu=not gpu)
    B, N = args.questions, args.samples
    cli.require(B % ranks.num_processes == 0, "--questions must be a multiple of the ranks")
    schedule = learning_rate(args)
    if not args.model:
        torch.set_num_threads(1)  # as toy_model.make_model does
        args.model = f"{args.out}/warm-start"
        if ranks.is_main_process:
            toy_model.warm_start(args.model, args.seed)
        ranks.wait_for_everyone()
    # The overlap of words asks nothing of the model or its tokenizer.
    checks = [] if args.reward == "overlap" else [check_sampling, cer.check_scoring]
    # All weights are trained in fp32; the trainer moves them to its device. Under adapters, which
    # are fp32 too, the frozen model is loaded as for sampling, on a GPU in bf16.
    model, tokenizer = load(args.model, ranks.device if args.lora else "cpu", *checks)
    beyond = list(range(model.tokenizer_size, model.get_input_embeddings().weight.shape[0]))
    problems = load_problems(args.dataset)
    problems, _ = usable_prompts(model, tokenizer, problems, args.dataset, args.max_new_tokens)
    rows = [{"prompt": chat_messages(p), "reference": p.references} for p in problems]
    settings = dict(
        **RULES,
        **schedule,
        generation_kwargs={"suppress_tokens": beyond or None},
        num_generations=N,
        max_completion_length=args.max_new_tokens,
        per_device_train_batch_size=N,  # one question per micro-batch
        gradient_accumulation_steps=B // ranks.num_processes,
        max_steps=args.steps,
        seed=args.seed,
        use_cpu=not gpu,
        bf16=gpu,
        output_dir=args.out,
        save_strategy="no",
        report_to="none",
    )
    grpo = args.grpo or args.reward == "verifree"
    config = GRPOConfig(**settings, **GRPO_RULES) if grpo else RLOOConfig(**settings)
    options = dict(args=config, processing_class=tokenizer, train_dataset=Dataset.from_list(rows))
    options["peft_config"] = lora_config(model, args.lora) if args.lora else None

    def cer_reward(prompts, completion_ids, reference, **others):
        return cer_rewards(trainer, prompts, completion_ids, reference)

    def overlap_reward(completions, reference, **others):
        return overlap_rewards(completions, reference)

    if args.reward == "verifree":
        trainer = VeriFreeTrainer(model, **options)
    else:
        function = cer_reward if args.reward == "cer" else overlap_reward
        trainer = (GRPOTrainer if grpo else RLOOTrainer)(model, function, **options)
    whole = "the weights are sharded (FSDP or ZeRO-3), but each rank needs all of them: use DDP"
    cli.require(not is_sharded(trainer), whole)
    trainer.train()
    if args.lora:
        trainer.save_model(f"{args.out}/adapter")
    if ranks.is_main_process:
        model = trainer.accelerator.unwrap_model(trainer.model)
        export(merged(model) if args.lora else model, tokenizer, f"{args.out}/model")


def learning_rate(args):
    """TRL's settings for train.py's rate, which falls for the toy and else is constant."""
    if args.model:
        lr = args.lr or (1e-4 if args.lora else 1e-6)
        return {"learning_rate": lr, "lr_scheduler_type": "constant"}
    toys = toy_model.LORA_RATE if args.lora else toy_model.LEARNING_RATE
    lr = args.lr or toys["lr"]
    to_its_end = {"power": 1.0, "lr_end": lr * toys["lr_end"]}  # with power 1 linearly
    falls = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": to_its_end}
    return {"learning_rate": lr, **falls}


def lora_config(model, rank):
    """Adapters of all linear layers but the head, as train.py's --lora, which also refuses a model
    in which these are not all that has matrices."""
    linear_layers(model, rank)
    with cli.as_input_error("--lora needs peft: pip install -r requirements-dev.txt"):
        from peft import LoraConfig
    return LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0)


def merged(model):
    """A model without its adapters, which are added to its weights. Both are fp32, since rounding
    the sum to bf16 would lose most of a small change."""
    return model.to("cpu", torch.float32).merge_and_unload()


if __name__ == "__main__":
    cli.run_script(main)
