"""How much memory a step's logits, and sampling from them on a device, take, decided before any is allocated.

A build says it before there is an engine, an executor allocates it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the logits that one run returns, unless the sequences of a step have more.
LOGITS_BYTES = 64 << 20
_LOGIT_BYTES = 4  # float32

# The most alternatives that a request may ask for at each token: a row's results have room for so many.
MAX_NUM_LOGPROBS = 64

# Bytes that each logit of a row takes while torch works on it, by what is done with the row. Sorting counts torch's
# own buffers in: keys and indices once more.
GREEDY_LOGIT = 32
DRAWN_LOGIT = 32
SORTED_LOGIT = 80
SCORED_LOGIT = 40

# Rows are worked on so many at a time that they stay within this.
SCRATCH_BYTES = 256 << 20
# More sequences with penalties than fit in here take turns: their counts are made again from their tokens.
COUNT_BYTES = 128 << 20

# Bytes of a pass's parameters: a row's numbers, and what each entry of its lists takes.
ROW_PARAMETERS = 256
MASK_PARAMETERS = 4  # a token id
BIAS_PARAMETERS = 8  # a token id and a value
COUNT_PARAMETERS = 8  # a place and an increment, for tokens of the prompt and for those of the output
FORM_WORD_PARAMETERS = 4  # the bits of 32 tokens
DRAFTED_PARAMETERS = 4  # a token id
# Of each token of the vocabulary, for a row whose lists have them all; a word of a form counts as if it were a token's.
_TOKEN_PARAMETERS = (
    FORM_WORD_PARAMETERS + DRAFTED_PARAMETERS + MASK_PARAMETERS + BIAS_PARAMETERS + 2 * COUNT_PARAMETERS
)
# int64: the token, and of its log-probability 4 numbers, ids and logits of the likeliest.
_ROW_RESULTS = 8 * (1 + 4 + 2 * MAX_NUM_LOGPROBS)


def num_logits_rows(vocab_size: int, *, max_batch_size: int, max_rows: int) -> int:
    """Of how many rows one run of an engine returns the logits: one of each sequence and what `LOGITS_BYTES` hold
    beyond, at most the `max_rows` that the engine takes.

    Steps that want more are run again for the others: log-probabilities of prompts only, for drafts keep within it.
    """
    return min(max_rows, max(max_batch_size, LOGITS_BYTES // (vocab_size * _LOGIT_BYTES)))


@dataclass(frozen=True, slots=True)
class SamplerSizes:
    """What a `DeviceSampler` works with, in bytes but for `max_rows` and `num_count_slots`.

    A pass is one upload of parameters, work, and one read of results; it takes `max_rows` rows at most, and the lists
    of any single row fit. Parameters and results are needed on the device and once more in pinned host memory.
    `scratch_bytes` is what torch allocates at work at most, `count_bytes` the token counts of `num_count_slots`
    sequences.
    """

    max_rows: int
    num_count_slots: int
    parameter_bytes: int
    result_bytes: int
    scratch_bytes: int
    count_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.pinned_bytes + self.torch_bytes

    @property
    def pinned_bytes(self) -> int:
        return self.parameter_bytes + self.result_bytes

    @property
    def torch_bytes(self) -> int:
        """What torch allocates by itself."""
        return self.scratch_bytes + self.count_bytes

    def rows_at_once(self, vocab_size: int, logit_bytes: int) -> int:
        """How many rows may be worked on together when each of their logits takes `logit_bytes`."""
        return max(1, self.scratch_bytes // (vocab_size * logit_bytes))


def sampler_sizes(vocab_size: int, max_batch_size: int, max_rows: int | None = None) -> SamplerSizes:
    """For steps of up to `max_batch_size` sequences with `max_rows` rows among them (None: one each), those of drafts
    included; more rows (choices that start together) take more passes.
    """
    max_rows = max(max_batch_size, max_rows or 0)
    row_bytes = vocab_size * SORTED_LOGIT
    slot_bytes = vocab_size * 4
    num_slots = min(max_batch_size, max(1, COUNT_BYTES // slot_bytes))
    return SamplerSizes(
        max_rows=max_rows,
        num_count_slots=num_slots,
        parameter_bytes=max_rows * ROW_PARAMETERS + vocab_size * _TOKEN_PARAMETERS,
        result_bytes=max_rows * _ROW_RESULTS,
        scratch_bytes=max(row_bytes, min(SCRATCH_BYTES, max_batch_size * row_bytes)),
        count_bytes=num_slots * slot_bytes,
    )
