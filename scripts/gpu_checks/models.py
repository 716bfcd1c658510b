"""A model end to end on a target, through the public command line and API: built, compared, timed."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PeltonError
from ..passages import passages
from .measure import arch_of, name_of
from .records import Agreement, Fact, Record, Speed
from .units import Unavailable, Unit

if TYPE_CHECKING:
    from ...runtime.llm import LLM
    from ...runtime.outputs import RequestOutput

# Of TensorRT-RTX; other targets build for any GPU that Pelton knows.
_NOT_FOR_RTX = (90, 100, 103, 110)
_NUM_TOP = 20  # likeliest tokens that a gap is looked up in


@dataclass(frozen=True, slots=True)
class Work:
    """What a model is asked for. Lengths are tokens."""

    dtype: torch.dtype = torch.float16
    prompt_lengths: tuple[int, ...] = (16, 33, 64, 129, 257, 400, 700, 1000)
    num_new_tokens: int = 64
    switched_lengths: tuple[int, ...] = (40, 97, 130, 257, 64, 31, 200)
    chunk_tokens: int = 16
    shared_tokens: int = 224  # the fourth of the switched prompts is sent once more, cut to this
    num_running: int = 32
    num_requests: int = 64
    request_tokens: int = 256
    output_tokens: int = 128
    ttft_tokens: int = 512
    repeats: int = 3
    build_options: tuple[str, ...] = ("--max-batch-size", "32", "--max-model-len", "2048")


def units(
    target: str, device: torch.device, directory: Path, model: Path, work: Work | None = None
) -> Iterator[Unit]:
    """What `pelton build --target TARGET` makes of `model`, a checkpoint directory or a .gguf file.

    The bundle stays in `directory` between processes; transformers computes on `device`.
    """
    work = work or Work()
    run = _Run(target, device, directory, model, work)
    yield Unit("build", partial(_build, run))
    yield Unit("tokens of transformers", partial(_against_transformers, run))
    yield Unit("tokens with features on and off", partial(_with_switches, run))
    yield Unit("speed", partial(_speed, run))
    yield Unit("speed of transformers", partial(_speed_of_transformers, run), is_ours=False)


@dataclass(frozen=True, slots=True)
class _Run:
    target: str
    device: torch.device
    directory: Path
    model: Path
    work: Work

    @property
    def bundle(self) -> Path:
        return self.directory / self.target

    def open(self, **options: Any) -> LLM:
        """The bundle. Raises `Unavailable` if there is none."""
        from ...runtime.llm import LLM

        if not (self.bundle / "manifest.json").exists():
            raise Unavailable("there is no bundle: the build failed")
        return LLM(self.bundle, **options)

    def checkpoint(self) -> Path:
        """The model as a Hugging Face directory in the dtype: the very weights that are built and compared."""
        from ...compile.gguf import convert_gguf

        if self.model.is_dir():
            return self.model
        converted = self.directory / f"checkpoint-{name_of(self.work.dtype)}"
        if not (converted / "tokenizer.json").exists():
            convert_gguf(self.model, converted, self.work.dtype)
        return converted

    def transformers(self) -> Any:
        """The model by transformers, on the device."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.checkpoint(), dtype=self.work.dtype).eval()
        model.generation_config.eos_token_id = None
        return model.to(self.device)


def _build(run: _Run) -> list[Record]:
    """Through the command line. `Unavailable` where TensorRT-RTX has nothing for the GPU."""
    options = ["--target", run.target, "--dtype", name_of(run.work.dtype), *run.work.build_options]
    if run.target == "tensorrt-rtx":
        arch = arch_of(run.device)
        if arch in _NOT_FOR_RTX:
            raise Unavailable(f"TensorRT-RTX does not build for compute capability {arch / 10:.1f}")
        options += ["--gpu", f"{arch / 10:.1f}"]
    package = __name__.partition(".")[0]
    command = [
        sys.executable,
        "-m",
        f"{package}.scripts.cli",
        "build",
        str(run.checkpoint()),
        "-o",
        str(run.bundle),
    ]
    start = time.perf_counter()
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise PeltonError(f"pelton build ended with status {done.returncode}: {done.stderr.strip()[-1000:]}")
    size = sum(path.stat().st_size for path in run.bundle.rglob("*") if path.is_file())
    return [Fact("build_seconds", seconds), Fact("bundle_bytes", size)]


def _against_transformers(run: _Run) -> list[Record]:
    """Greedy tokens of our engine, all prompts at once, against `generate` in the same dtype, one by one."""
    work = run.work
    with run.open() as llm:
        prompts = passages(llm.tokenizer.encode, list(work.prompt_lengths))
        tokens = [tokens_of(output) for output in llm.generate(prompts, _greedy(work.num_new_tokens))]
    _free()
    model = run.transformers()
    equal = agreed = 0
    gaps = []
    for prompt, ours in zip(prompts, tokens, strict=True):
        theirs, logits = _generate(model, run.device, prompt, work.num_new_tokens)
        first = first_difference(ours, theirs)
        agreed += len(theirs) if first is None else first
        equal += first is None
        if first is not None:
            row = logits[first].float()
            gaps.append(float(row[theirs[first]] - row[ours[first]]) if first < len(ours) else float("inf"))
    total = work.num_new_tokens * len(prompts)
    name = f"transformers in {name_of(work.dtype)}"
    return [Agreement(name, len(prompts), equal, total, agreed, tuple(gaps), gap_bound(work.dtype))]


def _generate(
    model: Any, device: torch.device, prompt: list[int], num_new_tokens: int
) -> tuple[list[int], Sequence[torch.Tensor]]:
    """Greedy tokens, and the logits `[vocab]` that each was chosen from."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt], device=device), max_new_tokens=num_new_tokens, do_sample=False,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), [row[0] for row in out.logits]


def _with_switches(run: _Run) -> Iterator[Record]:
    """Everything off and one request at a time, against each feature alone and then all."""
    work = run.work
    plain: dict[str, Any] = {"enable_prefix_caching": False, "max_batch_size": 1}
    switches: dict[str, dict[str, Any]] = {
        "prefix caching": plain | {"enable_prefix_caching": True},
        "chunked prefill": plain | {"max_chunk_tokens": work.chunk_tokens},
        "batching": {"enable_prefix_caching": False},
        "all of them": {"max_chunk_tokens": work.chunk_tokens},
    }
    prompts: list[list[int]] = []
    expected: list[RequestOutput] = []
    params = _greedy(work.num_new_tokens, logprobs=_NUM_TOP)
    for name, options in {"": plain, **switches}.items():
        with run.open(**options) as llm:
            if not prompts:
                prompts = passages(llm.tokenizer.encode, list(work.switched_lengths))
                prompts.append(prompts[3][: work.shared_tokens])
            outputs = llm.generate(prompts, params)
        _free()
        if not name:
            expected = outputs
            continue
        yield compare(name, outputs, expected, gap_bound(work.dtype))


def compare(
    name: str, outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], bound: float
) -> Agreement:
    """`expected` with the log-probabilities of its likeliest tokens. Raises the error of a request that failed."""
    gaps = []
    agreed = total = 0
    for output, reference in zip(outputs, expected, strict=True):
        ours, theirs = tokens_of(output), tokens_of(reference)
        first = first_difference(ours, theirs)
        total += len(theirs)
        agreed += len(theirs) if first is None else first
        if first is not None:
            gaps.append(_gap(reference, first, ours[first] if first < len(ours) else None))
    return Agreement(name, len(expected), len(expected) - len(gaps), total, agreed, tuple(gaps), bound)


def _gap(reference: RequestOutput, position: int, token: int | None) -> float:
    """How much likelier the reference's token at `position` is than `token`; infinity if that is not among its best."""
    entries = reference.outputs[0].logprobs
    if entries is None or position >= len(entries):
        return float("inf")
    logprob = dict(entries[position].top).get(-1 if token is None else token)
    return float("inf") if logprob is None else entries[position].logprob - logprob


def gap_bound(dtype: torch.dtype) -> float:
    """Six steps of `dtype` between 16 and 32, where the largest logits are; at least 1e-3."""
    return max(6 * 16 * torch.finfo(dtype).eps, 1e-3)


def tokens_of(output: RequestOutput) -> list[int]:
    """Of its one choice. Raises the choice's error if it has one."""
    choice = output.outputs[0]
    if choice.error is not None:
        raise choice.error
    return list(choice.token_ids)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs or that only one of them has."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _speed(run: _Run) -> list[Record]:
    """Streaming for the latencies; the first run of each kind warms up."""
    work = run.work
    with run.open(enable_prefix_caching=False) as llm:

        def first_token(prompt: list[int]) -> float:
            start = time.perf_counter()
            llm.generate([prompt], _greedy(1))
            return time.perf_counter() - start

        def per_token(prompt: list[int]) -> float:
            times, count = [], 0
            for delta in llm.stream(prompt, _greedy(work.output_tokens)):
                if delta.error is not None:
                    raise delta.error
                times.append(time.perf_counter())
                count = delta.num_output_tokens
            return (times[-1] - times[0]) / (count - 1)

        def all_at_once(prompts: list[list[int]]) -> float:
            start = time.perf_counter()
            count = sum(len(tokens_of(o)) for o in llm.generate(prompts, _greedy(work.output_tokens)))
            return count / (time.perf_counter() - start)

        return [_speeds(run.target, work, llm.tokenizer.encode, first_token, per_token, all_at_once)]


def _speed_of_transformers(run: _Run) -> list[Record]:
    """The same by `generate`; many requests in batches of as many as we run, padded to one length."""
    work = run.work
    with run.open() as llm:
        encode = llm.tokenizer.encode
    _free()
    model = run.transformers()

    def seconds(prompts: list[list[int]], num_new_tokens: int) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=run.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=run.device)
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0
            ).tolist()  # waits for the device
        return time.perf_counter() - start

    def per_token(prompt: list[int]) -> float:
        steps = work.output_tokens - 1
        return (seconds([prompt], work.output_tokens) - seconds([prompt], 1)) / steps

    def all_at_once(prompts: list[list[int]]) -> float:
        batches = [prompts[i : i + work.num_running] for i in range(0, len(prompts), work.num_running)]
        total = sum(seconds(batch, work.output_tokens) for batch in batches)
        return len(prompts) * work.output_tokens / total

    return [
        _speeds("transformers", work, encode, lambda prompt: seconds([prompt], 1), per_token, all_at_once)
    ]


def _speeds(
    name: str,
    work: Work,
    encode: Callable[[str], list[int]],
    first_token: Callable[[list[int]], float],
    per_token: Callable[[list[int]], float],
    all_at_once: Callable[[list[list[int]]], float],
) -> Speed:
    """Medians over the repeats; each measure is warmed up by one run."""
    long = passages(encode, [work.ttft_tokens] * (work.repeats + 1))
    short = passages(encode, [work.request_tokens] * (work.repeats + 1))
    lengths = [max(1, work.request_tokens * (i % 8 + 1) // 4) for i in range(work.num_requests)]
    many = passages(encode, lengths)
    all_at_once(many[: work.num_running])
    return Speed(
        name=name,
        ttft_ms=median([first_token(prompt) for prompt in long][1:]) * 1e3,
        tpot_ms=median([per_token(prompt) for prompt in short][1:]) * 1e3,
        output_tokens_per_s=median(all_at_once(many) for _ in range(work.repeats)),
    )


def _greedy(num_new_tokens: int, *, logprobs: int | None = None) -> Any:
    from ...runtime.request import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True, logprobs=logprobs)


def _free() -> None:
    """Give back the memory of an engine or model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
