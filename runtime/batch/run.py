"""The loop of a batch job: keeps the engine full, turns what it returns into records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from ...errors import EngineError, PeltonError, RequestError
from ..engine import Engine
from ..outputs import Delta
from ..protocol import ApiContext, Call, Reply, error_reply, read_call
from ..request import Request
from .forms import FormCompiler, PendingLine
from .lines import RawLine, as_object, parse_line
from .progress import JobProgress
from .records import RecordKey, answer_record, error_record
from .results import DoneLines, ResultWriter

# Lines looked at between two steps, so that a row of bad or done ones stalls nothing.
_MAX_LINES_PER_STEP = 256
_PROGRESS_INTERVAL_S = 0.1
_FORM_WAIT_S = 0.05  # with nothing to step, before the loop looks at everything again

_log = logging.getLogger(__name__)

OnProgress = Callable[[JobProgress], None]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`created` goes into every answer; `job_id` decides the seeds of requests that have none.

    `max_in_flight` bounds the choices admitted but not done; a line is admitted while fewer are in flight.
    `max_failures` lines that fail in a row inside the engine are too many: it is broken, not they.
    """

    job_id: str
    created: int
    model_names: tuple[str, ...]
    max_in_flight: int
    max_failures: int


@dataclass(slots=True)
class _InFlight:
    key: RecordKey
    custom_id: str
    requests: tuple[Request, ...]
    reply: Reply

    @property
    def num_choices(self) -> int:
        return sum(request.params.n for request in self.requests)


class JobRun:
    """One pass over the input that answers the lines not in `done`."""

    def __init__(
        self,
        engine: Engine,
        lines: Iterator[RawLine],
        writer: ResultWriter,
        done: DoneLines,
        start: JobProgress,
        settings: RunSettings,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._lines = lines
        self._writer = writer
        self._done = done
        self._start = start
        self._settings = settings
        self._clock = clock
        self._context = ApiContext(
            engine.tokenizer, engine.limits, settings.model_names, grammars=engine.grammars
        )
        self._forms = FormCompiler(self._context)
        self._in_flight: dict[str, _InFlight] = {}  # by request id
        self._num_in_flight = 0  # with those whose forms are being compiled
        self._is_input_read = False
        self._records: list[bytes] = []
        self._failures: list[tuple[int, bytes]] = []  # line and record, held until the engine answers another
        self._num_errors = start.num_errors
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self._started = self._reported = clock()

    def drive(self, on_progress: OnProgress | None, should_stop: Callable[[], bool]) -> None:
        """Run to the end of the input, or until `should_stop()`; nothing is in flight on return.

        An exception of the engine itself ends the run where it is; what is in flight runs again next time.
        """
        try:
            while not should_stop():
                self._advance()
                if on_progress is not None and self._clock() - self._reported >= _PROGRESS_INTERVAL_S:
                    self._reported = self._clock()
                    on_progress(self.progress())
                if self._is_input_read and not self._in_flight and not self._forms.is_busy:
                    self._keep_failures(self._failures)
                    self._write()
                    break
        finally:
            self._forms.close()
        self._abort_all()
        if on_progress is not None:
            on_progress(self.progress())

    def _advance(self) -> None:
        self._take_compiled()
        self._fill()
        if self._in_flight:
            self._step()
        elif self._forms.is_busy:
            self._forms.wait(_FORM_WAIT_S)
        self._write()

    def progress(self) -> JobProgress:
        return replace(
            self._start,
            num_done=self._done.count,
            num_errors=self._num_errors,
            num_in_flight=self._num_in_flight,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            elapsed_s=self._clock() - self._started,
        )

    def _write(self) -> None:
        self._writer.append(self._records)
        self._records.clear()
        self._writer.sync_if_due()

    def _fill(self) -> None:
        for _ in range(_MAX_LINES_PER_STEP):
            if self._is_input_read or self._num_in_flight >= self._settings.max_in_flight:
                return
            line = next(self._lines, None)
            if line is None:
                self._is_input_read = True
            elif not line.is_blank and line.number not in self._done:
                self._start_line(line)

    def _start_line(self, line: RawLine) -> None:
        key = RecordKey(self._settings.job_id, line.number)
        try:
            parsed = parse_line(line)
            call = read_call(parsed.url, parsed.body, self._context, key.call_id)
        except Exception as error:
            custom_id = (as_object(line) or {}).get("custom_id")
            self._write_error(key, custom_id if isinstance(custom_id, str) else None, error)
            return
        pending = PendingLine(key, parsed.custom_id, call)
        if call.form is None:
            self._start_call(pending, call)
        else:
            self._num_in_flight += call.num_choices
            self._forms.submit(pending)

    def _take_compiled(self) -> None:
        for line, compiled in self._forms.take():
            self._num_in_flight -= line.call.num_choices
            if isinstance(compiled, Exception):
                self._write_error(line.key, line.custom_id, compiled)
            else:
                self._start_call(line, compiled)

    def _start_call(self, line: PendingLine, call: Call) -> None:
        try:
            requests = self._with_seeds(call, line.key.line)
            self._admit(requests)
        except Exception as error:
            self._write_error(line.key, line.custom_id, error)
            return
        reply = Reply(replace(call, requests=requests), self._context, self._settings.created)
        item = _InFlight(line.key, line.custom_id, requests, reply)
        self._in_flight.update((request.request_id, item) for request in requests)
        self._num_in_flight += item.num_choices

    def _with_seeds(self, call: Call, line: int) -> tuple[Request, ...]:
        return tuple(
            request
            if request.params.seed is not None
            else replace(request, params=replace(request.params, seed=self._seed_of(line, index)))
            for index, request in enumerate(call.requests)
        )

    def _seed_of(self, line: int, index: int) -> int:
        text = f"{self._settings.job_id} {line} {index}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def _admit(self, requests: tuple[Request, ...]) -> None:
        """All of a line's requests or none."""
        for position, request in enumerate(requests):
            try:
                self._engine.admit(request)
            except Exception:
                for admitted in requests[:position]:
                    self._engine.abort(admitted.request_id)
                raise

    def _step(self) -> None:
        if not self._engine.has_work:
            lines = sorted({item.key.line for item in self._in_flight.values()})
            raise EngineError(f"the engine is idle but has not answered lines {lines}")
        for delta in self._engine.step():
            self._take(delta)

    def _take(self, delta: Delta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and delta.index == 0:
            self._num_prompt_tokens += delta.num_prompt_tokens
            self._num_cached_tokens += delta.num_cached_tokens
        item = self._in_flight.get(delta.request_id)
        if item is None:  # aborted: another choice of its line failed
            return
        error = self._feed(item, delta)
        if error is not None:
            self._write_error(item.key, item.custom_id, error)
        elif not item.reply.is_done:
            return
        self._num_in_flight -= item.num_choices
        for request in item.requests:
            del self._in_flight[request.request_id]
            if error is not None:
                self._engine.abort(request.request_id)

    def _feed(self, item: _InFlight, delta: Delta) -> Exception | None:
        """Take the delta, write the answer when it is whole; what went wrong, if anything did."""
        try:
            item.reply.feed(delta)
            if item.reply.error is None and item.reply.is_done:
                self._write_answer(item)
        except Exception as error:
            return error
        return item.reply.error

    def _write_answer(self, item: _InFlight) -> None:
        body = item.reply.body()
        usage = body.get("usage")
        if isinstance(usage, dict):
            # How much of a prompt was cached depends on what ran before: it would make a resumed run differ.
            usage.pop("prompt_tokens_details", None)
        record = answer_record(item.key, item.custom_id, body)
        self._keep_failures(self._failures)
        self._done.add(item.key.line)
        self._records.append(record)

    def _write_error(self, key: RecordKey, custom_id: str | None, cause: Exception) -> None:
        """A line's own fault is written at once, one of the engine when it has answered another line.

        A bug that one line meets is not the end of the others either.
        """
        if isinstance(cause, PeltonError):
            error = cause
        else:
            _log.error("line %d met a bug", key.line, exc_info=cause)
            error = EngineError(f"a bug in Pelton: {cause!r}; the job's log has the traceback")
        status, body = error_reply(error)
        failure = (key.line, error_record(key, custom_id, status, body))
        if isinstance(error, RequestError):
            self._keep_failures([failure])
            return
        self._failures.append(failure)
        if len(self._failures) >= self._settings.max_failures:
            raise EngineError(
                f"{len(self._failures)} lines in a row failed inside the engine, the last (line {key.line}) "
                f"with: {error}. They are not written; once that is mended, run the same command again"
            ) from cause

    def _keep_failures(self, failures: list[tuple[int, bytes]]) -> None:
        for line, record in failures:
            self._done.add(line)
            self._records.append(record)
        self._num_errors += len(failures)
        failures.clear()

    def _abort_all(self) -> None:
        for request_id in self._in_flight:
            self._engine.abort(request_id)
        self._in_flight.clear()
        self._num_in_flight = 0
        while self._engine.has_work:
            self._engine.step()
