"""The engine on scripted executors: every ending, isolation between requests, and sameness under preemption."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import pelton.runtime.engine as engine_module
from pelton.errors import ConfigError, EngineError, RequestError
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.inputs import StepInputs
from pelton.runtime.outputs import Delta
from pelton.runtime.request import Request, SamplingParams
from support.draining import drain
from support.scripted import ScriptedExecutor, digest
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer

LIMITS = ExecutorLimits(
    max_model_len=256,
    max_batch_size=8,
    max_step_tokens=64,
    block_size=16,
    num_blocks=64,
    vocab_size=NUM_PADDED_LOGITS,
)


def make_engine(
    next_token: object = None,
    *,
    config: EngineConfig | None = None,
    hooks: dict[str, object] | None = None,
    **limits: int,
) -> Engine:
    executor = ScriptedExecutor(next_token or digest(200), replace(LIMITS, **limits), **(hooks or {}))  # type: ignore[arg-type]
    return Engine(executor, byte_tokenizer(), config or EngineConfig(check_invariants=True))


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[Delta]]:
    for request in requests:
        engine.admit(request)
    return drain(engine)


def tokens(deltas: list[Delta]) -> list[int]:
    return [t for delta in deltas for t in delta.token_ids]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(200) for _ in range(length))


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)  # type: ignore[arg-type]


def test_pc_06_no_answer_holds_a_foreign_codeword() -> None:
    """200 requests share a prefix and repeat their own codeword, out of a pool that holds a few of them."""
    separator, word_length, shared = 199, 6, prompt(37, seed=5)

    def repeat_codeword(context: Sequence[int]) -> int:
        at = context.index(separator) if isinstance(context, list) else list(context).index(separator)
        word = context[at - word_length : at]
        return word[(len(context) - at - 1) % word_length]

    shared = tuple(t for t in shared if t != separator)
    engine = make_engine(repeat_codeword, num_blocks=14)
    source = random.Random(1)
    lengths: dict[str, int] = {}
    words = {f"r{i}": tuple(source.randrange(190) for _ in range(word_length)) for i in range(200)}
    for name, word in words.items():
        own = tuple(source.randrange(190) for _ in range(source.randrange(20)))
        lengths[name] = source.randint(6, 40)
        engine.admit(Request(name, (*shared, *own, *word, separator), greedy(lengths[name])))
    aborted = set(source.sample(sorted(words), 60))
    pending = set(aborted)
    got: dict[str, list[int]] = {name: [] for name in words}
    reasons: dict[str, str] = {}
    while engine.has_work:
        if pending and source.random() < 0.3:
            engine.abort(pending.pop())
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    for name, word in words.items():
        expected = [word[i % word_length] for i in range(len(got[name]))]
        assert got[name] == expected, name
        if name not in aborted:
            assert (reasons[name], len(got[name])) == ("length", lengths[name]), name
    assert "abort" in reasons.values()
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hit_tokens > 0
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_blocks", [8, 10, 13])
def test_sc_05_preemption_changes_nothing_that_a_client_sees(num_blocks: int) -> None:
    def requests() -> list[Request]:
        params = [
            greedy(60, logprobs=2, repetition_penalty=1.3),
            SamplingParams(
                temperature=0.9, seed=3, max_tokens=55, min_tokens=50, presence_penalty=1.0, logprobs=1
            ),
            greedy(50, frequency_penalty=0.7),
        ]
        return [Request(f"r{i}", prompt(17 + 5 * i, seed=i), p) for i, p in enumerate(params)]

    calm = run(make_engine(num_blocks=64), *requests())
    engine = make_engine(num_blocks=num_blocks)
    tight = run(engine, *requests())
    assert engine.stats().num_preemptions > 0

    def visible(deltas: list[Delta]) -> list[Delta]:
        return [replace(delta, num_cached_tokens=0) for delta in deltas]

    assert {k: visible(v) for k, v in tight.items()} == {k: visible(v) for k, v in calm.items()}


def test_sa_04_a_seeded_request_does_not_depend_on_its_mates() -> None:
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=30, ignore_eos=True)
    target = Request("target", prompt(21), params)

    def flat(number: int, logits: np.ndarray) -> None:
        logits[:, :190] += np.linspace(0, 3, 190, dtype=np.float32)

    hooks: dict[str, object] = {"after_step": flat}
    alone = tokens(run(make_engine(hooks=hooks), target)["target", 0])
    assert len(set(alone)) > 5
    unseeded = [
        Request(
            f"mate{i}", prompt(9 + i, seed=i), SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
        )
        for i in range(7)
    ]
    for mates in (unseeded[:1], unseeded):
        for order in ([target, *mates], [*mates, target]):
            assert tokens(run(make_engine(hooks=hooks), *order)["target", 0]) == alone
    tight = make_engine(num_blocks=12, hooks=hooks)
    assert tokens(run(tight, *unseeded, target)["target", 0]) == alone
    assert tight.stats().num_preemptions > 0


def test_choices_of_one_request_share_the_prompt_and_differ_by_seed() -> None:
    def flat(number: int, logits: np.ndarray) -> None:
        logits[:] = np.linspace(0, 1, logits.shape[1], dtype=np.float32)

    executor_hooks: dict[str, object] = {"after_step": flat}
    engine = make_engine(hooks=executor_hooks)
    results = run(
        engine, Request("r", prompt(40), SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True))
    )
    assert sorted(results) == [("r", i) for i in range(4)]
    assert len({tuple(tokens(d)) for d in results.values()}) == 4
    # The prompt once (40), then 19 tokens of each choice are computed.
    assert engine._executor.num_computed_tokens == 40 + 4 * 19  # type: ignore[attr-defined]


def test_greedy_choices_are_equal_and_right_after_copy_on_write() -> None:
    one = tokens(run(make_engine(), Request("r", prompt(35), greedy(30)))["r", 0])
    results = run(make_engine(), Request("r", prompt(35), greedy(30, n=3)))
    assert [tokens(results["r", i]) for i in range(3)] == [one] * 3


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_pc_03_prompt_logprobs_are_the_same_with_a_warm_cache(length: int) -> None:
    request = Request("scored", prompt(length), greedy(2, prompt_logprobs=1))
    plain = Request("plain", prompt(length), greedy(2))
    cold = run(make_engine(config=EngineConfig(enable_prefix_caching=False)), request)["scored", 0][
        0
    ].prompt_logprobs
    engine = make_engine()
    seen = []
    for turn in (request, plain, request):
        deltas = run(engine, turn)[turn.request_id, 0]
        if turn is request:
            seen.append(deltas[0].prompt_logprobs)
            assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    assert seen == [cold, cold]
    assert cold is not None
    assert len(cold) == length
    assert cold[0] is None
    assert all(entry is not None for entry in cold[1:])


def test_a_failed_step_ends_its_requests_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def fail_when_seven_is_read(number: int, inputs: StepInputs) -> None:
        if 7 in inputs.input_ids.tolist():
            raise RuntimeError("broken kernel")

    engine = make_engine(lambda context: 3, hooks={"before_step": fail_when_seven_is_read}, max_batch_size=1)
    results = run(engine, Request("bad", (1, 7, 2), greedy(4)), Request("good", (1, 2, 3), greedy(4)))
    (failed,) = results["bad", 0]
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, EngineError)
    # The client learns which request failed, the log why.
    assert str(failed.error) == "request bad: the engine failed on this request; the log has the cause"
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "bad" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "broken kernel"
    assert tokens(results["good", 0]) == [3, 3, 3, 3]
    assert engine.stats().num_used_blocks == 0


def test_sa_06_nan_logits_fail_the_one_request() -> None:
    def poison_first_row(number: int, logits: np.ndarray) -> None:
        if number == 3:
            logits[0, :] = np.nan

    engine = make_engine(lambda context: 3, hooks={"after_step": poison_first_row})
    results = run(engine, Request("a", (1, 2), greedy(6)), Request("b", (4, 5), greedy(6)))
    reasons = {name: deltas[-1].finish_reason for (name, _), deltas in results.items()}
    assert sorted(reasons.values()) == ["error", "length"]
    failed = next(deltas for deltas in results.values() if deltas[-1].finish_reason == "error")
    assert tokens(failed) == [3, 3]


@pytest.mark.parametrize("n", [1, 2])
def test_sa_06_nan_prompt_logits_fail_the_one_request(n: int) -> None:
    """The poisoned row predicts the second prompt token of `scored`; nothing is sampled from it."""

    def poison_first_row(number: int, logits: np.ndarray) -> None:
        if number == 1:
            logits[0, :] = np.nan

    engine = make_engine(lambda context: 3, hooks={"after_step": poison_first_row})
    results = run(
        engine,
        Request("scored", (1, 2, 4, 5), greedy(6, n=n, prompt_logprobs=0)),
        Request("plain", (4, 5), greedy(6)),
        Request("other", (6, 5), greedy(6, prompt_logprobs=0)),
    )
    for index in range(n):
        (failed,) = results["scored", index]
        assert (failed.finish_reason, failed.token_ids, failed.prompt_logprobs) == ("error", (), None)
        assert isinstance(failed.error, EngineError)
        assert "request scored, prompt_logprobs: " in str(failed.error)
    for name in ("plain", "other"):
        assert (results[name, 0][-1].finish_reason, tokens(results[name, 0])) == ("length", [3] * 6)
    assert results["other", 0][0].prompt_logprobs is not None
    assert engine.stats().num_used_blocks == 0


def test_deadline_ends_a_request_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second here. The deadline passes in the fourth, whose token is kept."""
    now = 0.0

    def tick(number: int, logits: np.ndarray) -> None:
        nonlocal now
        now = float(number)

    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    engine = make_engine(lambda context: 3, hooks={"after_step": tick})
    results = run(
        engine,
        Request("late", prompt(5), greedy(50), deadline=3.5),
        Request("early", prompt(5), greedy(50), deadline=0.0),
        Request("free", prompt(5), greedy(8)),
    )
    assert (results["late", 0][-1].finish_reason, tokens(results["late", 0])) == ("deadline", [3] * 4)
    assert results["late", 0][-1].num_output_tokens == 4
    assert (results["early", 0][-1].finish_reason, tokens(results["early", 0])) == ("deadline", [])
    assert (results["free", 0][-1].finish_reason, tokens(results["free", 0])) == ("length", [3] * 8)
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("n", [1, 3])
def test_sc_08_abort_at_every_step_leaves_nothing(n: int) -> None:
    engine = make_engine(num_blocks=24)
    for moment in range(40):
        engine.admit(Request("r", prompt(70), SamplingParams(n=n, max_tokens=30, ignore_eos=True)))
        deltas = [delta for _ in range(moment) for delta in engine.step()]
        engine.abort("r")
        deltas += engine.step()
        ends = [delta.index for delta in deltas if delta.finish_reason is not None]
        assert sorted(ends) == list(range(n))
        assert not engine.has_work
        stats = engine.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_stop_token_eos_and_ignore_eos() -> None:
    (eos,) = byte_tokenizer().eos_token_ids
    script = [10, 11, eos, 12, 13]

    def scripted(context: Sequence[int]) -> int:
        return script[min(len(context) - 2, len(script) - 1)]

    def one(**params: object) -> Delta:
        deltas = run(
            make_engine(scripted), Request("r", (1, 2), SamplingParams(temperature=0, max_tokens=5, **params))
        )  # type: ignore[arg-type]
        return replace(deltas["r", 0][-1], token_ids=tuple(tokens(deltas["r", 0])))

    ended = one()
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ((10, 11, eos), "stop", None)
    stopped = one(stop_token_ids=(11,))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ((10, 11), "stop", 11)
    ignored = one(ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ((10, 11, eos, 12, 13), "length")


def test_max_tokens_zero_scores_the_prompt() -> None:
    engine = make_engine()
    (delta,) = run(engine, Request("r", prompt(90), greedy(0, prompt_logprobs=0)))["r", 0]
    assert delta.finish_reason == "length"
    assert delta.token_ids == ()
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 90


def test_admission_names_the_field() -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as refused:
        engine.admit(Request("r", (1, NUM_PADDED_LOGITS), greedy(1)))
    assert refused.value.field == "prompt"
    with pytest.raises(RequestError, match="256 tokens"):
        engine.admit(Request("r", prompt(256), greedy(1)))
    assert not engine.has_work
    engine.admit(Request("r", prompt(3), greedy(1)))
    with pytest.raises(RequestError, match="in use"):
        engine.admit(Request("r", prompt(3), greedy(1)))


def test_close_ends_what_runs() -> None:
    engine = make_engine()
    engine.admit(Request("r", prompt(3), greedy(50)))
    engine.step()
    engine.close()
    assert engine.step()[-1].finish_reason == "abort"
    assert not engine.has_work


@pytest.mark.parametrize("name", ["max_batch_size", "max_step_tokens"])
def test_more_than_the_engine_was_built_for_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_engine(config=EngineConfig(**{name: 1000}))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
@pytest.mark.parametrize(
    "name", ["max_batch_size", "max_step_tokens", "max_chunk_tokens", "kv_cache_bytes", "num_threads"]
)
def test_a_setting_below_one_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be an integer of at least 1"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]
