"""A rollout and a training step on the same weights: which importance ratios come out as 1, and what makes them so.

    pip install -c constraints.txt '.[engine]'      # the CPU build of torch first: README, Installing
    GOMP_SPINCOUNT=1000 python examples/rollout.py [MODEL] [DTYPE]      # bounds OpenMP's spinning (README, Threads)

A policy gradient weighs each token by exp(trainer's logprob - rollout's logprob). Before the first step both have the
same weights, so every ratio is 1 in theory. Without arguments it takes SmolLM2 in float32; bfloat16 shows how far
a forward with other shapes is off in half precision.

Which row a trainer's softmax has to be of: with filters alone, the receipt's kept mass or the kept set corrects the
model's own row. The kept mass is a share of the row after bans, so with bans take the softmax over the kept set. With
a bias, penalties or processors, do to the trainer's row first what they did (`klero.rewrite`), then take the kept set.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klero import LLM, SamplingParams
from klero.engine.models.fetch import fetch
from klero.evals import Pair, score_pairs
from klero.logprobs import Logprobs

PROMPTS = ["The best thing about the sea is", "My friend opened the door and", "To bake bread you need"]
TEMPERATURE = 0.8
PARAMS = SamplingParams(
    temperature=TEMPERATURE, top_p=0.9, n=4, seed=1, max_tokens=16, ignore_eos=True,
    logprobs=0, return_kept=True,  # the sampled token with its receipt, and the ids that the filters left
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One choice of a rollout, and what was said about its tokens when they were drawn."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    said: Logprobs
    advantage: float


def roll_out(llm: LLM, prompts: Sequence[str], params: SamplingParams = PARAMS) -> list[Answer]:
    """Answers with their advantages: rewards, less the mean of the same prompt, over their deviation."""
    answers = []
    for output in llm.generate(list(prompts), params):
        rewards = np.array([reward(choice.text) for choice in output.outputs])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for choice, advantage in zip(output.outputs, advantages.tolist(), strict=True):
            answers.append(Answer(output.prompt_token_ids, choice.token_ids, choice.logprobs, advantage))
    return answers


def reward(text: str) -> float:
    """What the training is after: vowels."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1)


def trainer_rows(module: torch.nn.Module, answers: Sequence[Answer]) -> list[torch.Tensor]:
    """The logits [n, V] that each answer's tokens were drawn from, by a plain padded forward with gradients."""
    module.set_attn_implementation("eager")  # klero takes its own again at its next forward
    wholes = [torch.tensor(answer.prompt_ids + answer.token_ids) for answer in answers]
    ids = torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(whole) for whole in wholes], batch_first=True)
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return [logits[i, len(a.prompt_ids) - 1 : len(wholes[i]) - 1] for i, a in enumerate(answers)]


def of_tokens(rows: Sequence[torch.Tensor], answers: Sequence[Answer], temperature: float = 1.0) -> torch.Tensor:
    """The logprob of each token, all answers in one tensor."""
    parts = []
    for row, answer in zip(rows, answers, strict=True):
        logprobs = torch.log_softmax(row / temperature, dim=-1)
        parts.append(logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0])
    return torch.cat(parts)


def keep(rows: Sequence[torch.Tensor], answers: Sequence[Answer]) -> list[torch.Tensor]:
    """The rows with -inf wherever the filters had removed a token: the distribution that was drawn from."""
    kept = []
    for row, answer in zip(rows, answers, strict=True):
        removed = torch.ones(row.shape, dtype=torch.bool)
        for i in range(len(row)):
            removed[i, torch.from_numpy(answer.said.kept_of(i)[0]).long()] = False
        kept.append(row.masked_fill(removed, -math.inf))
    return kept


def reported(answers: Sequence[Answer], column: str) -> torch.Tensor:
    """A column of what the rollout said, all answers in one tensor."""
    return torch.from_numpy(np.concatenate([getattr(answer.said, column) for answer in answers]))


def deterministic(llm: LLM, answers: Sequence[Answer]) -> torch.Tensor:
    """Raw logprobs of the same tokens by klero's forward, each sequence as one prompt instead of token by token."""
    pairs = [Pair(answer.prompt_ids + answer.token_ids, len(answer.prompt_ids)) for answer in answers]
    return torch.from_numpy(np.concatenate([one.logprobs[one.first :] for one in score_pairs(llm, pairs)]))


def ratios(llm: LLM, module: torch.nn.Module, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """Importance ratios before any step, by what a trainer might compare; all should be 1."""
    with torch.no_grad():
        rows = trainer_rows(module, answers)
        raw, tempered = of_tokens(rows, answers), of_tokens(rows, answers, TEMPERATURE)
        replayed = of_tokens(keep(rows, answers), answers, TEMPERATURE)
    mass = reported(answers, "kept_mass")
    logs = {
        "plain forward, raw, beside processed: two kinds": raw - reported(answers, "processed"),
        "the same at the temperature, filters forgotten": tempered - reported(answers, "processed"),
        "  less the receipt's ln of the kept mass": tempered - mass - reported(answers, "processed"),
        "  or with the kept set replayed": replayed - reported(answers, "processed"),
        "plain forward, raw, beside the receipt's raw": raw - reported(answers, "raw"),
        "klero's forward, raw, beside the receipt's raw": deterministic(llm, answers) - reported(answers, "raw"),
    }
    return {name: log.exp() for name, log in logs.items()}


def most_common(answers: Sequence[Answer], num: int) -> list[int]:
    """The ids that were said most often."""
    times = np.bincount(np.concatenate([answer.token_ids for answer in answers]))
    return [int(token_id) for token_id in np.argsort(-times)[:num]]


def ratios_with_bans(module: torch.nn.Module, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """The two corrections once more, where the filters saw a row without the banned tokens."""
    with torch.no_grad():
        rows = trainer_rows(module, answers)
        tempered, replayed = of_tokens(rows, answers, TEMPERATURE), of_tokens(keep(rows, answers), answers, TEMPERATURE)
    logs = {
        "with bans, less ln of the kept mass: another row's": tempered - reported(answers, "kept_mass"),
        "  but with the kept set replayed": replayed,
    }
    return {name: (log - reported(answers, "processed")).exp() for name, log in logs.items()}


def train(module: torch.nn.Module, answers: Sequence[Answer], lr: float) -> tuple[float, torch.Tensor]:
    """One step on the kept set's ratios; the loss, and each token's ratio after the step."""
    weights = torch.cat([torch.full((len(answer.token_ids),), answer.advantage) for answer in answers])

    def policy() -> torch.Tensor:
        logprobs = of_tokens(keep(trainer_rows(module, answers), answers), answers, TEMPERATURE)
        return (logprobs - reported(answers, "processed")).exp()

    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    loss = -(policy() * weights).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return loss.item(), policy()


def main(model: str = "smollm2", dtype: str = "float32", lr: float = 0.0005) -> None:
    """Roll out, compare, step, and look through the LLM at the weights that the step has changed."""
    directory = fetch("smollm2") if model == "smollm2" else model
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    with LLM(module, tokenizer=AutoTokenizer.from_pretrained(directory), num_blocks=128) as llm:
        answers = roll_out(llm, PROMPTS)
        print(f"{len(answers)} answers, {sum(len(answer.token_ids) for answer in answers)} tokens")
        print(f"{'ratio of':<50}{'mean':>9}{'mean |r - 1|':>14}{'largest':>10}")
        without = dataclasses.replace(PARAMS, bad_token_ids=most_common(answers, 5))
        banned = ratios_with_bans(module, roll_out(llm, PROMPTS, without))
        for name, ratio in (ratios(llm, module, answers) | banned).items():
            off = (ratio - 1).abs()
            print(f"{name:<50}{ratio.mean():>9.5f}{off.mean():>14.1e}{off.max():>10.1e}")

        loss, after = train(module, answers, lr)
        parts = after.split([len(answer.token_ids) for answer in answers])
        better = torch.cat([part for part, answer in zip(parts, answers, strict=True) if answer.advantage > 0])
        worse = torch.cat([part for part, answer in zip(parts, answers, strict=True) if answer.advantage < 0])
        print(f"a step, loss {loss:.4f}: mean ratio of better answers {better.mean():.4f}, of worse {worse.mean():.4f}")

        with torch.no_grad():
            raw = of_tokens(trainer_rows(module, answers), answers)
        new = deterministic(llm, answers)
        moved, off = (new - reported(answers, "raw")).abs().mean(), (new - raw).abs().mean()
        print(f"the LLM has the new weights: logprobs moved by {moved:.1e}, and are {off:.1e} from the trainer's")


if __name__ == "__main__":
    main(*sys.argv[1:3])
