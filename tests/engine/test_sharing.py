"""Blocks of several: children and their prompt, cached prefixes, swap; and steps in parts. What the books say of it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.free import assert_all_free
from tests.engine.said import assert_prompt
from tests.engine.scheduling import choices, end, engine_of, held, hot, running, tokens_of

from klero import OptionError
from klero.batch import Buckets
from klero.engine import LLM
from klero.testing.models import PagedToyModel, ToyModel

# --- children share their prompt


def test_children_share_the_prompt_and_only_its_tail_is_copied():
    """Ten tokens in blocks of 4: two blocks are shared for good, the third is copied for all but the last who write."""
    engine, moves = engine_of(), []
    carry_out = engine.model.move_blocks
    engine.model.move_blocks = lambda some: (moves.append(some), carry_out(some))
    engine.add_request("a", list(range(10)), hot(5, n=3))
    engine.step()
    assert held(engine) == {"a0": [0, 1, 2], "a1": [], "a2": []}
    engine.step()
    assert held(engine) == {"a0": [0, 1, 2], "a1": [0, 1, 3], "a2": [0, 1, 4]}
    assert [some.copy for some in moves] == [((2, 3), (2, 4))]
    assert [engine.kv.blocks.num_owners(block) for block in range(5)] == [3, 3, 1, 1, 1]
    output = end(engine)["a"]
    assert [c.token_ids for c in output.outputs] == tokens_of(list(range(10)), hot(5, n=3))
    assert len({c.token_ids for c in output.outputs}) == 3
    assert output.metrics.num_prompt_tokens_computed == 10 + 1 + 1  # each child computes the last for its logits
    assert len(moves) == 1


def test_a_child_outlives_the_sibling_whose_blocks_it_shares():
    engine = engine_of()
    engine.add_request("a", list(range(8)), hot(9, n=2, stop_token_ids=list(range(0, 64, 2))))
    found = end(engine)["a"]
    assert [c.token_ids for c in found.outputs] == tokens_of(
        list(range(8)), hot(9, n=2, stop_token_ids=list(range(0, 64, 2)))
    )


def test_others_do_not_wait_for_the_prompt_that_children_wait_for():
    """a1 waits for a0's prompt; b comes in beside it, because a seat is left when a1 has its own."""
    engine = engine_of(max_num_batched_tokens=8, max_num_seqs=3)
    engine.add_request("a", [1] * 6, hot(4, n=2))
    engine.add_request("b", [2] * 2, hot(4))
    engine.add_request("c", [3], hot(4))
    engine.step()
    assert running(engine) == ["a0", "b"]
    engine.step()
    assert running(engine) == ["a0", "a1", "b"]
    end(engine)


def test_who_waits_for_a_sibling_keeps_a_seat():
    engine = engine_of(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add_request("a", [1] * 6, hot(4, n=2))
    engine.add_request("b", [2] * 2, hot(30))
    engine.step()
    assert running(engine) == ["a0"]
    assert list(end(engine)) == ["a", "b"]


# --- prefixes


def cached(output):
    return output.metrics.num_cached_tokens


def test_a_prefix_is_reused_whoever_computed_it_and_after_its_end():
    """Blocks of 4. Of 12 equal tokens 8 are taken: the last one is computed, for its logits."""
    llm, prompt = LLM(PagedToyModel(), block_size=4, num_blocks=64), list(range(12))
    first, again = (llm.generate([prompt], hot(3))[0] for _ in range(2))
    longer = llm.generate([[*prompt, 50]], hot(3))[0]
    other = llm.generate([[9, *prompt]], hot(3))[0]
    assert [cached(output) for output in (first, again, longer, other)] == [0, 8, 12, 0]
    assert [o.metrics.num_prompt_tokens_computed for o in (first, again, longer, other)] == [12, 4, 1, 13]
    assert first.outputs == again.outputs
    assert longer.outputs[0].token_ids == tokens_of([*prompt, 50], hot(3))[0]
    answered = [*prompt, *first.outputs[0].token_ids]  # 15 tokens, of which 14 were computed
    assert cached(llm.generate([[*answered, 1, 2]], hot(3))[0]) == 12
    engine = llm.engine
    assert engine.kv.blocks.num_hits > 0
    llm.reset_prefix_cache()
    assert engine.kv.blocks.num_cached == 0
    assert cached(llm.generate([prompt], hot(3))[0]) == 0


def test_a_prefix_is_shared_while_it_runs_but_not_before_it_is_computed():
    engine, prompt = engine_of(max_num_batched_tokens=64), list(range(12))
    for name in ("a", "b"):  # at once: neither has the other's
        engine.add_request(name, prompt, hot(9))
    engine.step()
    engine.add_request("c", prompt, hot(9))
    engine.step()
    blocks = held(engine)
    assert blocks["a"][:3] == [0, 1, 2]
    assert blocks["c"][:2] == [0, 1]
    assert not set(blocks["a"]) & set(blocks["b"])
    found = end(engine)
    assert [cached(found[name]) for name in "abc"] == [0, 0, 8]
    assert len({found[name].outputs[0].token_ids for name in "abc"}) == 1


def test_a_salt_separates():
    llm, prompt = LLM(PagedToyModel(), block_size=4, num_blocks=64), list(range(12))
    counts = [
        cached(llm.generate([prompt], hot(2), cache_salt=salt)[0]) for salt in (None, "a", "b", "a", "", None, "b")
    ]
    assert counts == [0, 0, 0, 8, 0, 8, 8]


def test_without_the_cache_nothing_is_kept():
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=64, enable_prefix_caching=False)
    assert [cached(llm.generate([list(range(12))], hot(2))[0]) for _ in range(2)] == [0, 0]
    assert llm.engine.kv.blocks.num_cached == llm.engine.kv.blocks.num_queries == 0


def test_a_scored_prompt_is_computed_whole_and_said_in_full():
    llm, prompt = LLM(PagedToyModel(), block_size=4, num_blocks=64), list(range(12))
    llm.generate([prompt], hot(2))
    (output,) = llm.generate([prompt], hot(2, prompt_logprobs=2, return_context_logits=True))
    assert (cached(output), output.metrics.num_prompt_tokens_computed) == (0, 12)
    assert_prompt(output, prompt, 2)
    assert output.context_mask.all()
    assert cached(llm.generate([prompt], hot(2))[0]) == 8


def test_embeddings_are_shared_by_their_content_alone():
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=64)
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    zeros = [0] * 6 + [1, 2, 3, 4]
    asked = [{"prompt_embeds": part, "prompt_token_ids": [1, 2, 3, 4]} for part in (rows, rows + 1, rows, rows[:5])]
    outputs = [llm.generate([prompt], hot(4))[0] for prompt in (zeros, *asked)]
    assert [cached(output) for output in outputs] == [0, 0, 0, 8, 0]
    assert outputs[1].outputs == outputs[3].outputs
    assert len({output.outputs[0].token_ids for output in outputs}) == 4


class Poisoned(PagedToyModel):
    """NaN in the row of position 5 while `on`."""

    on = True

    def forward(self, step):
        logits = super().forward(step)
        if self.on:
            logits[step.positions[step.logits_rows] == 5] = np.nan
        return logits


@pytest.mark.parametrize("fields, prompt_len", [({}, 6), ({"prompt_logprobs": 0}, 9), ({}, 4)])
def test_nobody_shares_what_gave_no_logits(fields, prompt_len):
    """Whether the row was to be drawn from, of the prompt or after it, or only scored."""
    llm, prompt = LLM(Poisoned(), block_size=2, num_blocks=64), list(range(prompt_len))
    (bad,) = llm.generate([prompt], hot(4, **fields))
    assert bad.outputs[0].finish_reason == "error"
    assert llm.engine.kv.blocks.num_cached == 0
    llm.engine.model.on = False
    (good,) = llm.generate([prompt], hot(4))
    assert cached(good) == 0
    assert good.outputs[0].token_ids == tokens_of(prompt, hot(4))[0]


def test_changed_weights_are_not_answered_from_the_cache():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=2, bos_token_id=1,
        pad_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).float().eval()
    options, prompt, params = {"block_size": 4, "num_blocks": 64}, list(range(3, 40)), hot(12, ignore_eos=True)
    llm = LLM(module, **options)
    before = [llm.generate([prompt], params)[0] for _ in range(2)]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    after = [llm.generate([prompt], params)[0] for _ in range(2)]
    (fresh,) = LLM(module, **options).generate([prompt], params)
    assert [cached(output) for output in (*before, *after)] == [0, 36, 0, 36]
    assert before[0].outputs == before[1].outputs
    assert after[0].outputs == after[1].outputs == fresh.outputs
    assert before[0].outputs[0].token_ids != fresh.outputs[0].token_ids


# --- swap


def test_swapped_out_and_in_instead_of_computed_again():
    """Two of 7 + 13 tokens in 6 blocks: the same preemption, and no token is computed twice."""
    model, computed = PagedToyModel(), {}
    for swap in (0, 6):
        space = swap * model.bytes_per_block(4) / 2**30
        engine = engine_of(num_blocks=6, enable_prefix_caching=False, swap_space=space)
        moves, carry_out = [], engine.model.move_blocks
        engine.model.move_blocks = lambda some, to=moves, do=carry_out: (to.append(some), do(some))
        for name, token in (("a", 1), ("b", 2)):
            engine.add_request(name, [token] * 7, hot(13))
        found = end(engine)
        assert [found[name].outputs[0].token_ids for name in "ab"] == [
            tokens_of([1] * 7, hot(13))[0], tokens_of([2] * 7, hot(13))[0],
        ]  # fmt: skip
        assert found["b"].metrics.num_preemptions == engine.scheduler.num_preemptions == 1
        computed[swap] = engine.times.num_tokens
        swapped = [(len(some.swap_out), len(some.swap_in)) for some in moves if some.swap_out or some.swap_in]
        assert swapped == ([(3, 0), (0, 3)] if swap else [])
    assert computed[6] == 2 * 19  # of 20 tokens the last is never computed
    assert computed[0] > computed[6]


def test_host_memory_that_is_full_means_computing_again():
    model = PagedToyModel()
    engine = engine_of(num_blocks=6, enable_prefix_caching=False, swap_space=model.bytes_per_block(4) / 2**30)
    assert engine.kv.host.num_blocks == 1
    for name, token in (("a", 1), ("b", 2)):
        engine.add_request(name, [token] * 7, hot(13))
    found = end(engine)
    assert engine.times.num_tokens > 2 * 19
    assert found["b"].outputs[0].token_ids == tokens_of([2] * 7, hot(13))[0]


def test_what_is_swapped_out_can_be_aborted():
    engine = engine_of(num_blocks=6, enable_prefix_caching=False, swap_space=1 / 2**20)
    for name, token in (("a", 1), ("b", 2)):
        engine.add_request(name, [token] * 7, hot(13))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert choices(engine)["b"].held.host_ids
    num = choices(engine)["b"].finish.num_tokens
    output = engine.abort("b")
    assert output.outputs[0].token_ids == tokens_of([2] * 7, hot(13))[0][:num]
    assert engine.kv.host.num_free == engine.kv.host.num_blocks
    assert end(engine)["a"].outputs[0].token_ids == tokens_of([1] * 7, hot(13))[0]


@pytest.mark.parametrize("which", ["swap_out", "swap_in", "copy"])
def test_moves_that_fail_are_made_good_by_computing_again(which):
    """The first step with such a move raises, after half of what it does; nobody is left with false blocks."""
    engine = engine_of(num_blocks=7, swap_space=1 / 2**20)
    carry_out, failed = engine.model.move_blocks, []

    def fail_once(moves):
        carry_out(moves)
        if getattr(moves, which) and not failed:
            failed.append(moves)
            engine.model._memory[:] = -1
            raise RuntimeError("the bus is down")

    engine.model.move_blocks = fail_once
    engine.add_request("a", [1] * 7, hot(13, n=2))
    engine.add_request("b", [2] * 7, hot(13))
    found = {}
    while engine.num_unfinished:
        try:
            found |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            assert engine.kv.blocks.num_free == 7
    assert len(failed) == 1
    assert [c.token_ids for c in found["a"].outputs] == tokens_of([1] * 7, hot(13, n=2))
    assert [c.token_ids for c in found["b"].outputs] == tokens_of([2] * 7, hot(13))
    assert_all_free(engine)


@pytest.mark.parametrize("value, words", [(-1, "number >= 0"), ("4", "number >= 0"), (1e-12, "not one block")])
def test_swap_space_is_checked(value, words):
    with pytest.raises(OptionError, match=words):
        engine_of(swap_space=value)


def test_a_model_that_moves_no_blocks_cannot_swap():
    with pytest.raises(OptionError, match="ToyModel moves no blocks"):
        engine_of(ToyModel(), swap_space=1)


# --- parts of a step


def test_a_step_that_no_bucket_holds_runs_in_parts():
    """Buckets of 4 tokens and 2 rows, a step of 12 tokens that are all scored, three sequences at once."""
    engine = engine_of(buckets=Buckets((2, 4), (1, 2)), max_num_batched_tokens=16)
    shapes, forward = [], engine.model.forward
    engine.model.forward = lambda step: (shapes.append((len(step.input_ids), len(step.slots))), forward(step))[1]
    params = hot(3, prompt_logprobs=1)
    for name in "abc":
        engine.add_request(name, list(range(12)), params)
    found = end(engine)
    assert set(shapes) <= {(2, 1), (2, 2), (4, 1), (4, 2)}
    for name in "abc":
        assert_prompt(found[name], list(range(12)), 1)
        assert found[name].outputs[0].token_ids == tokens_of(list(range(12)), params)[0]
