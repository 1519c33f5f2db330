"""``LLM``: prompts in, answers out, over the batch slots of one session."""

import reprlib
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from typing import Any

from qwen_mtp.errors import MissingExtraError, RequestError
from qwen_mtp.runtime.closing import Closing
from qwen_mtp.runtime.engines import kernels_of
from qwen_mtp.runtime.limits import check_request
from qwen_mtp.runtime.outputs import CompletionOutput, Delta, RequestOutput, StatsCounter
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.runner import GraphRunner
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session, StepTimes
from qwen_mtp.runtime.stops import StopChecker
from qwen_mtp.runtime.text import Detokenizer, Text

Prompt = str | Sequence[int]


@dataclass(slots=True)
class _Request:
    """One request on its way through a slot."""

    index: int
    prompt: str | None
    ids: list[int]
    sampling: ResolvedSampling
    checker: StopChecker
    stats: StatsCounter
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])


class LLM(Closing):
    """Runs one package; a context manager.

    Not safe for use from several threads at once: the batch slots are the way to run requests
    side by side.
    """

    def __init__(
        self,
        package: str | PathLike[str],
        *,
        threads: int | None = None,
        num_speculative_tokens: int | None = None,
        adaptive: bool = True,
        device: int | None = None,
        native: bool | None = None,
        engine: GraphRunner | None = None,
    ) -> None:
        """Load a package.

        Args:
            package: Directory that ``qwen-mtp-export`` wrote. Graphs for Ascend must have been
                compiled, see ``ascend/README.md`` in it.
            threads: ONNX Runtime: threads inside an operator; None takes the number of usable
                cores.
            num_speculative_tokens: Drafts a round, 0 = plain decoding on the same package; None
                takes the largest the package was exported for.
            adaptive: Of these, propose as many each round as pay, by measured costs and recent
                acceptance; False always proposes all. Greedy text does not depend on it, and a
                seed repeats its text either way.
            device: Ascend: which NPU, as ``npu-smi info`` counts; None takes the first.
            native: ONNX Runtime: run on the native kernels of this machine, which may compile
                them, or not; None where that can be.
            engine: What runs the graphs instead, made for the same package; it is the caller's
                to close. ``InterpretedEngine`` runs those for Ascend without an NPU.

        Raises:
            MissingExtraError: Ascend: CANN's module ``acl`` cannot be imported.
            PackageError: The package contradicts its manifest, cannot be loaded, or is not
                compiled yet.
            RequestError: A number is out of range, or ``engine`` is not for this package.
        """
        self.package = Package.open(package)
        if engine is not None:
            _check_engine(self.package, engine, threads=threads, device=device, native=native)
        self._session: Session | None = Session(
            self.package,
            threads=threads,
            num_speculative_tokens=num_speculative_tokens,
            adaptive=adaptive,
            device=device,
            native=native,
            engine=engine,
        )
        self._text: Text | None = None
        self._busy = False

    def close(self) -> None:
        """Free the model and its state; closing twice is harmless.

        Raises:
            PackageError: AscendCL refused to release something; the rest was released.
        """
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def kernels(self) -> str:
        """What computes: ``native`` kernels, ``onnxruntime``, ``ascend``; empty once closed."""
        return "" if self._session is None else kernels_of(self._session.engine)

    @property
    def text(self) -> Text:
        """The package's tokenizer and chat template.

        Raises:
            MissingExtraError: The extra ``text`` is not installed.
            PackageError: The package has no usable tokenizer.
        """
        if self._text is None:
            self._text = Text(self.package.directory)
        return self._text

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            sampling_params: One for all or one each; None takes the package's defaults.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: A prompt or parameter that the package cannot serve; nothing was run.
        """
        requests = self._requests(prompts, sampling_params)
        for _ in self._run(requests):
            pass
        return [_output(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Answer every prompt piece by piece: only verified tokens, as soon as they are.

        Arguments and errors are those of :meth:`generate`. Closing the iterator early frees the
        slots.

        Yields:
            Deltas; ``index`` is the prompt's place in the list.
        """
        return self._run(self._requests(prompts, sampling_params))

    def _run(self, requests: list[_Request]) -> Iterator[Delta]:
        session = self._open_session()
        if self._busy:
            raise RequestError("another stream of this LLM is not finished: close or exhaust it")
        self._busy = True
        waiting, active = deque(requests), dict[int, _Request]()
        try:
            while waiting or active:
                while waiting and session.free_slots:
                    yield from self._admit(session, waiting.popleft(), active)
                if active:
                    yield from self._advance(session, active)
        finally:
            self._busy = False
            for slot in active:
                session.release(slot)

    def _admit(
        self, session: Session, request: _Request, active: dict[int, _Request]
    ) -> Iterator[Delta]:
        slot, token = session.prefill(request.ids, request.sampling)
        active[slot] = request
        _add_times(request.stats, session.times)
        yield self._push(session, slot, active, [token])

    def _advance(self, session: Session, active: dict[int, _Request]) -> Iterator[Delta]:
        results = session.step()
        deltas, errors = [], []
        for slot, result in results.items():
            request = active[slot]
            if result.error is not None:
                del active[slot]
                errors.append(f"prompt {request.index}: {result.error}")
                continue
            before = len(request.checker.token_ids)
            deltas.append(self._push(session, slot, active, result.tokens, result.drafted))
            kept = len(request.checker.token_ids) - before
            request.stats.count_round(result.drafted, result.accepted, kept)
            _add_times(request.stats, session.times)
        yield from deltas
        if errors:
            raise RequestError(errors[0])

    def _push(
        self,
        session: Session,
        slot: int,
        active: dict[int, _Request],
        tokens: Sequence[int],
        drafted: int = 0,
    ) -> Delta:
        """Take tokens into the answer; a finished request leaves its slot at once."""
        request = active[slot]
        verdict = request.checker.push(tokens)
        if verdict.finish_reason is not None:
            session.release(slot)
            del active[slot]
        return Delta(
            request.name,
            request.index,
            verdict.text,
            tuple(tokens[: verdict.kept]),
            verdict.finish_reason,
            verdict.stop_reason,
            drafted,
        )

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Request]:
        several = _prompt_list(prompts)
        params = _params_list(sampling_params, len(several))
        return [
            self._request(i, p, s) for i, (p, s) in enumerate(zip(several, params, strict=True))
        ]

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> _Request:
        session, manifest = self._open_session(), self.package.manifest
        text = prompt if isinstance(prompt, str) else None
        ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = params.resolve(manifest.generation)
        check_request(manifest, ids, sampling)
        ids = [int(token) for token in ids]
        checker = StopChecker(
            sampling,
            eos_ids=manifest.config.eos_token_ids,
            prompt_length=len(ids),
            max_model_len=manifest.geometry.max_model_len,
            detokenizer=self._detokenizer(needed=text is not None or bool(sampling.stop)),
        )
        return _Request(index, text, ids, sampling, checker, StatsCounter(session.lookahead))

    def _detokenizer(self, *, needed: bool) -> Detokenizer | None:
        """A fresh one; None where ids came in and no tokenizer is at hand."""
        if not needed and not (self.package.directory / "tokenizer.json").is_file():
            return None
        try:
            return self.text.detokenizer()
        except MissingExtraError:
            if needed:
                raise
            return None

    def _open_session(self) -> Session:
        if self._session is None:
            raise RequestError("this LLM is closed: make a new one")
        return self._session


def _check_engine(package: Package, engine: GraphRunner, **choices: int | None) -> None:
    for name, value in choices.items():
        if value is not None:
            raise RequestError(f"{name} is {value}: the engine that is given has its own")
    if engine.package.manifest.graphs != package.manifest.graphs:
        other = engine.package.directory
        raise RequestError(f"{package.directory}: the engine runs {other}; give its own package")


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of texts and lists of ids."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if not items:
        raise RequestError("no prompt: give a text, token ids, or a list of either")
    if all(isinstance(item, Integral) for item in items):
        return [items]
    return [item if isinstance(item, str) else _items(item) for item in items]


def _items(value: Any) -> list[Any]:
    """The elements of a list, tuple, array or tensor of one dimension or more."""
    try:
        if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
            return list(value)
    except TypeError:  # arrays without a dimension pretend
        pass
    found = reprlib.repr(value)
    raise RequestError(f"a prompt is {found}: give a text, token ids, or a list of either")


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    items: list[Any] = list(params) if isinstance(params, Sequence) else [params]
    for item in items:
        if not isinstance(item, SamplingParams):
            found = reprlib.repr(item)
            raise RequestError(f"sampling_params is or holds {found}: give SamplingParams")
    if len(items) != count:
        raise RequestError(
            f"{len(items)} sampling parameters for {count} prompts: give one, or one each"
        )
    return items


def _add_times(stats: StatsCounter, times: StepTimes) -> None:
    stats.add_ms("prefill", times.prefill)
    stats.add_ms("draft", times.draft)
    stats.add_ms("verify", times.verify)
    stats.add_ms("host", times.host)


def _output(request: _Request) -> RequestOutput:
    checker = request.checker
    answer = CompletionOutput(
        0, checker.text, checker.token_ids, checker.finish_reason, checker.stop_reason
    )
    return RequestOutput(
        request.name,
        request.prompt,
        tuple(request.ids),
        (answer,),
        checker.finish_reason is not None,
        request.sampling.seed,
        request.stats.freeze(),
    )
