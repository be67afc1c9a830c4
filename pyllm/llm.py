"""LLM: the public API. Opens a model on a device and generates text with it.

    LLM -> Scheduler -> Executor -> model -> ops -> device

This module wires those parts together and turns text into requests and tokens into text; it decides nothing about
scheduling and does no array maths.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.chat_prompt import encode_chat, encode_chats
from pyllm.chat_template import ChatTemplate
from pyllm.device import Device, open_device
from pyllm.engine_options import EngineOptions
from pyllm.errors import DeviceError, ModelFileError, PyllmError, TemplateError, UnsupportedError, UsageError
from pyllm.executor import Executor
from pyllm.generation import Chunk, Generation
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_split import open_model
from pyllm.guests import Guests
from pyllm.input_block import InputLayout
from pyllm.interrupts import deferred_interrupt
from pyllm.kv_cache import KVCache
from pyllm.kv_trace import DEFAULT_EVERY, KVTrace
from pyllm.kv_types import KV_TYPES, KVType, kv_type_by_name
from pyllm.models import check_model, load_model
from pyllm.models.weights import Weights
from pyllm.overflow import Overflow
from pyllm.prompt_cache.fingerprint import fingerprint
from pyllm.prompt_cache.kept import KeptPrompts, budgets
from pyllm.prompt_cache.sessions import Session
from pyllm.prompt_cache.tree import shared_length
from pyllm.recurrent_cache import RecurrentCache
from pyllm.request import Request
from pyllm.sampling import Sampler, SamplingParams, breaker_ids
from pyllm.scheduler import Scheduler
from pyllm.tokenizer import Tokenizer

TAG_BYTES = 4  # beside each row of each layer
LEAST_BATCH = 2048  # tokens

Progress = Callable[[int, int], None]
PrefillProgress = Callable[[int, int, int], None]


class LLM:
    """A model, ready to generate. Close it, or use it as a context manager.

    One engine serves several callers: `generate` and `chat` return iterators, and those that are open at the same time
    run side by side, up to `n_seqs` of them. Calls from several threads are safe; they take turns.

    Args:
        path: a GGUF file.
        device: "auto" (the GPU where CuPy finds one), "gpu", "cpu", or "emulated" (for tests).
        ctx_size: tokens that one sequence may hold; at most what the model was trained for.
        batch_size: tokens that may be queued on the device at once; default: two ubatches, at least 2,048.
        ubatch_size: tokens that run through the model together; default: 512 on the CPU, 2,048 on a GPU.
        kv_type: storage of K and V rows, "f16", "f32", "bf16", "q8_0" (half of f16) or "q4_0" (a quarter).
        n_seqs: sequences that run at the same time, each with `ctx_size` tokens of its own.
        progress: called with (bytes read, bytes in all) while weights are loaded.
        inflight: ubatches queued ahead of the device; default: what suits the device.
        prefix_cache: keep the K/V rows of ended sequences, as long as pages last, for prompts that begin like them;
            `stats["cached_tokens"]` says how many tokens that saved. Of recurrent layers, checkpoints are kept.
        cache_ram: bytes of pinned host memory that what is kept may take; default: an eighth of the machine's memory,
            at most 4 GiB. Taken when it is needed. Sessions that are saved or loaded take a few pages beside it.
        cache_dir: a folder for conversations, which later processes find again there; it is made private. None: nothing
            is written to disk.
        cache_pages: let pages that have to leave the device go to that memory; default: where the device has memory of
            its own, or `cache_ram` is given. Checkpoints of recurrent layers always do.
        cache_disk: bytes that the files in `cache_dir` may take; default: 8 GiB.
        overflow: when the context is full, "stop" ends the answer, "error" raises ContextError, and "shift" drops
            tokens behind the first `keep` and goes on behind the rest, whose rows are shifted; prompts that are too
            long are cut before they are computed. See `pyllm.overflow`. `stats["dropped_tokens"]` says how many went.
        keep: tokens at the beginning that "shift" leaves alone; of a chat, the system message at least.
        graphs: record the launches of a decode step and replay them (on a GPU as a graph); False: queue each by itself.
        inputs: "copy": each step's inputs are copied into device memory first; "zero-copy": the tables of its K/V rows
            are read in pinned host memory. The results are the same; zero-copy is for measurements.
        batch_invariant: the logits of a token depend on its own sequence alone, in every bit: not on what runs beside
            it, on the cutting into ubatches or on what was kept. Slower; for devices with kernels.
        kv_trace: a file for hashes of the K/V rows that sequences give up, for diagnostics; see `pyllm.kv_trace`.
        kv_trace_every: hash the rows of each so-manieth position.

    Attributes:
        tokenizer: of the file.
        model_path, architecture, ctx_size, vocab_size.

    Raises:
        ModelFileError: the file is missing or damaged.
        UnsupportedError: pyllm cannot run this model on this device.
        DeviceError: the device is missing or out of memory.
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = "auto",
        ctx_size: int = 4096,
        batch_size: int | None = None,
        ubatch_size: int | None = None,
        kv_type: str = "f16",
        n_seqs: int = 1,
        *,
        inflight: int | None = None,
        graphs: bool = True,
        inputs: str = "copy",
        kv_trace: str | os.PathLike[str] | None = None,
        kv_trace_every: int = DEFAULT_EVERY,
        prefix_cache: bool = False,
        cache_ram: int | None = None,
        cache_pages: bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_disk: int | None = None,
        overflow: str = "stop",
        keep: int = 0,
        batch_invariant: bool = False,
        progress: Progress | None = None,
    ) -> None:
        options = EngineOptions(
            *(ctx_size, batch_size, ubatch_size, kv_type, n_seqs, inflight),
            inputs=inputs,
            kv_trace=kv_trace,
            kv_trace_every=kv_trace_every,
            prefix_cache=prefix_cache,
            cache_ram=cache_ram,
            cache_pages=cache_pages,
            cache_dir=cache_dir,
            cache_disk=cache_disk,
            overflow=overflow,
            keep=keep,
            batch_invariant=batch_invariant,
        )
        self._open(path, open_device(device, graphs), options, progress)

    @classmethod
    def with_options(
        cls, path: str | os.PathLike[str], device: Device, options: EngineOptions, progress: Progress | None = None
    ) -> LLM:
        """An engine on a device that the caller opened, with every setting in the caller's hands (tests, benches)."""
        llm = cls.__new__(cls)
        llm._open(path, device, options, progress)
        return llm

    def _open(
        self, path: str | os.PathLike[str], device: Device, options: EngineOptions, progress: Progress | None
    ) -> None:
        self._lock = threading.RLock()
        self._guests = Guests()
        self._device = device
        self._stats: Callable[[], dict[str, Any]] = dict
        self._kept: KeptPrompts | None = None
        self._trace: KVTrace | None = None
        self._breakers: dict[tuple[str, ...], frozenset[int]] = {}
        self._finalizer = weakref.finalize(self, device.close)  # also at interpreter exit: the stream is drained first
        try:
            if not isinstance(path, (str, os.PathLike)):
                raise UsageError(f"the path of a model is needed, not {type(path).__name__}")
            if options.batch_invariant:
                device.make_batch_invariant()
            with open_model(path) as gguf:
                self._read_texts(gguf)
                self._build(gguf, options, progress)
        except MemoryError as error:
            self.close()
            raise DeviceError(f"{path}: not enough memory on {device.name}; try a smaller context (-c)") from error
        except BaseException:
            self.close()
            raise

    def _read_texts(self, gguf: GGUFModel) -> None:
        self.model_path = Path(gguf.path)
        self.architecture = gguf.architecture
        self.tokenizer = Tokenizer.from_metadata(gguf.metadata, str(gguf.path))
        embedding = gguf.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[0] < self.tokenizer.vocab_size:
            raise ModelFileError(
                f"{gguf.path}: tokenizer.ggml.tokens lists {self.tokenizer.vocab_size} tokens, token_embd.weight has "
                f"{embedding.shape[0]} rows; the file is damaged"
            )
        prefix = "tokenizer.chat_template"
        self._templates = {key: gguf.metadata[key] for key in gguf.metadata if key.startswith(prefix)}

    def _build(self, gguf: GGUFModel, options: EngineOptions, progress: Progress | None) -> None:
        kv_type = kv_type_by_name(options.kv_type)
        self._check_rows(gguf, options, kv_type)
        model = self._model = load_model(gguf, self._device, progress)
        config = model.config
        self.vocab_size = model.vocab_size
        self._n_seqs = options.n_seqs
        self.ctx_size = min(options.ctx_size, config.context_length)
        max_pages = -(-self.ctx_size // options.page_size)
        # Where the device's memory is the host's, pages that leave it make no room: they do so only if it is asked for.
        wanted = options.cache_pages
        if wanted is None:
            wanted = options.cache_ram is not None or not self._device.shares_memory
        page_budget, state_budget = budgets(
            options.cache_ram, wanted and options.prefix_cache, config.recurrent is not None
        )
        recurrent = None
        if config.recurrent:
            recurrent = RecurrentCache(self._device, config.recurrent, options.n_seqs, state_budget)
        self._cache = KVCache(
            self._device,
            len(config.attention_layers),
            config.num_kv_heads * config.key_length,
            config.num_kv_heads * config.value_length,
            max_pages * options.n_seqs,
            options.page_size,
            kv_type,
            options.page_order,
            recurrent,
        )
        ubatch_size = min(options.ubatch_size or self._device.default_ubatch_size, self.ctx_size * options.n_seqs)
        layout = InputLayout(ubatch_size, options.n_seqs, max_pages)
        inflight = options.inflight or self._device.default_inflight
        ring_depth = options.ring_depth or inflight
        self._executor = Executor(
            *(self._device, model, self._cache, layout, ring_depth, inflight, options.hooks),
            zero_copy=options.inputs == "zero-copy",
        )
        if options.kv_trace is not None:
            submitted = partial(getattr, self._executor, "num_submitted")
            self._trace = KVTrace(options.kv_trace, self._cache, submitted, options.kv_trace_every)
            self._cache.before_removal = self._trace.note
        if options.prefix_cache:
            arithmetic = f"batch-invariant, {self._device.description}" if options.batch_invariant else ""
            identity = fingerprint(gguf, config, kv_type, options.page_size, arithmetic)
            folder = None if options.cache_dir is None else Path(options.cache_dir)
            engine = self._cache, self._lock, self._guests, identity, self.tokenizer.vocab_size
            self._kept = KeptPrompts(*engine, page_budget, folder, options.cache_disk)
        overflow = Overflow(options.overflow, options.keep)
        self._shifts = overflow.kind == "shift"
        self._scheduler = Scheduler(
            self._executor,
            self._cache,
            self.ctx_size,
            options.batch_size or max(LEAST_BATCH, 2 * ubatch_size),
            ubatch_size,
            options.n_seqs,
            self.tokenizer.eog_ids.__contains__,
            self.tokenizer.vocab_size,
            self._kept.index if self._kept is not None else None,
            replace(overflow, keep=max(overflow.keep, int(self.tokenizer.add_bos))),
        )

    def _check_rows(self, gguf: GGUFModel, options: EngineOptions, kv_type: KVType) -> None:
        """Refuse rows that the type cannot hold or that cannot fit, before anything is read."""
        config = check_model(gguf, self._device)
        for size in (config.key_length, config.value_length):
            if size % kv_type.block:
                plain = ", ".join(name for name, other in KV_TYPES.items() if other.block == 1)
                raise UnsupportedError(
                    f"{gguf.path}: heads of {size} elements; K/V rows of type {kv_type.name} hold blocks of "
                    f"{kv_type.block}: choose another --kv-type ({plain})"
                )
        rows = min(options.ctx_size, config.context_length) * options.n_seqs
        widths = (config.num_kv_heads * config.key_length, config.num_kv_heads * config.value_length)
        needed = rows * len(config.attention_layers) * (sum(map(kv_type.row_bytes, widths)) + TAG_BYTES)
        if config.recurrent:
            needed += options.n_seqs * config.recurrent.sequence_bytes
        if needed > self._device.memory_bytes:
            raise DeviceError(
                f"K/V rows for {rows} tokens need {needed / 1e9:.1f} GB, {self._device.name} has "
                f"{self._device.memory_bytes / 1e9:.1f} GB; try a smaller context (-c)"
            )

    # text

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see `Tokenizer.encode`.

        Raises:
            UsageError: not a text.
        """
        if not isinstance(text, str):
            raise UsageError(f"a text is needed, not {type(text).__name__}")
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens as their text.

        Raises:
            UsageError: not token ids of this model.
        """
        return self.tokenizer.decode(_token_ids(ids))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """The chat template, rendered.

        Raises:
            TemplateError: the template is malformed, or refuses the messages.
        """
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, **template_args)

    @cached_property
    def template(self) -> ChatTemplate:
        """The file's chat template; when it has none, with a logged warning, a common one that suits its vocabulary.

        Raises:
            TemplateError: the file's template is malformed.
        """
        return ChatTemplate.from_metadata(
            self._templates,
            str(self.model_path),
            self.tokenizer.bos_token,
            self.tokenizer.eos_token,
            special_tokens=self.tokenizer.control_texts(),
        )

    # generation

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue a prompt.

        Args:
            prompt: text, or token ids that are used as they are.
            params: how to sample; default SamplingParams().

        Yields:
            One chunk per token. Closing the iterator ends the generation.

        Raises:
            ContextError: the prompt is empty or too long.
            PyllmError: the generation broke off; what was yielded before is right.
        """
        return self._stream(self._request(prompt, params))

    def begin(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, keep_answer: bool = True
    ) -> Generation:
        """Queue a prompt, for programs that run many side by side: `advance` moves all on, and each `Generation`
        has what came for it. Arguments as in `generate`. To be closed unless it has ended.

        Args:
            keep_answer: another prompt may go on behind the answer. Otherwise what is kept for prompts that begin alike
                is the prompt alone.

        Raises:
            ContextError: the prompt is empty or too long.
            UsageError: an argument is wrong.
        """
        request = self._request(prompt, params)
        request.keeps_answer = keep_answer
        generation = Generation(request, self.tokenizer, self._end_one)
        self._add(request)
        return generation

    def advance(self, meanwhile: Callable[[], bool] | None = None) -> bool:
        """One step of the engine for all generations; False when there was nothing to do.

        Args:
            meanwhile: called again and again where the host would wait for the device, until it returns False: for
                little things, a few of them each time.

        Raises:
            DeviceError: the device failed; nothing can go on.
        """
        with self._lock:
            found = self._scheduler.step(meanwhile)
        self._guests.give_way()
        return found

    def start_prompts(self) -> None:
        """Let the device begin with the prompts that were queued, if these are many, while the caller prepares more.

        Raises:
            DeviceError: the device failed; nothing can go on.
        """
        with self._lock:
            self._scheduler.start_prompts()

    def _request(
        self, prompt: str | Sequence[int], params: SamplingParams | None, turn_start: int | None = None
    ) -> Request:
        """A request; `turn_start`: where the assistant's turn begins in the prompt, as far as that is known."""
        ids = self.tokenize(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params is a {type(params).__name__}; it must be SamplingParams")
        sampler = Sampler(params, self.tokenizer.vocab_size, self._dry_breakers(params))
        checkpoints = (len(ids) - 1, len(ids)) if turn_start is None else (turn_start,)
        return Request(ids, len(ids), params, sampler, checkpoints=checkpoints)

    def _add(self, request: Request) -> None:
        if self._kept is not None:
            self._kept.begin(request)
        with self._guests, self._lock:
            self._scheduler.add(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answers: Sequence[Sequence[int]] = (),
        progress: PrefillProgress | None = None,
        **template_args: Any,
    ) -> Iterator[Chunk]:
        """Answer the last message of a conversation.

        Args:
            messages: mappings with "role" and "content". Special-token strings in them are plain text.
            answers: token ids of the assistant's messages, in order, as they were generated; with them the beginning of
                a conversation that was kept matches, however its text would be encoded.
            progress: called with (tokens of the prompt whose rows are there, all of them, those that were there before)
                after each step of the engine, until the first token comes.
            template_args: further variables for the template.

        Yields:
            As `generate`.

        Raises:
            TemplateError: the template is malformed, or refuses the messages.
        """
        template_args["answers"] = answers
        ids = self.chat_tokens(messages, **template_args)
        request = self._request(ids, params, self._turn_start(ids, messages, template_args))
        request.keep = self._system_length(ids, messages, template_args)
        return self._stream(request, progress)

    def _system_length(
        self, ids: list[int], messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
    ) -> int:
        """Tokens of the system message, which stays when the context is full. 0 where nobody will ask."""
        if not self._shifts or not messages or messages[0].get("role") != "system":
            return 0
        try:
            return shared_length(
                ids, self.chat_tokens(messages[:1], **{**template_args, "add_generation_prompt": False})
            )
        except TemplateError:  # it wants a question
            return 0

    def _turn_start(
        self, ids: list[int], messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
    ) -> int | None:
        """Up to where a conversation's tokens stay what they are however the assistant's turn goes on: before a think
        block, which later turns leave out. None where nobody will ask."""
        if (
            self._kept is None
            or self._cache.recurrent is None
            or template_args.get("add_generation_prompt", True) is not True
        ):
            return None
        try:
            before = self.chat_tokens(messages, **{**template_args, "add_generation_prompt": False})
        except TemplateError:
            return None
        return shared_length(ids[:-1], before) or None

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation, ready to be answered. Arguments and errors as in `chat`."""
        return encode_chat(self.tokenizer, self.template, messages, **template_args)

    def chats_tokens(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]
    ) -> list[list[int] | PyllmError]:
        """`chat_tokens` of several conversations, each with variables for the template, at less cost. What is wrong
        with one of them stands in the place of its ids.

        Raises:
            TemplateError: the template is malformed.
        """
        return encode_chats(self.tokenizer, self.template, conversations)

    def _dry_breakers(self, params: SamplingParams) -> frozenset[int]:
        """Tokens at which a repetition ends, for the DRY penalty; looked up once for each set of breakers."""
        if not params.dry_multiplier:
            return frozenset()
        key = tuple(params.dry_sequence_breakers)
        if key not in self._breakers:
            self._breakers[key] = breaker_ids(self.tokenizer, key)
        return self._breakers[key]

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of a fresh sequence: float32 [len(ids), vocab_size]."""
        return self.logits_batch([ids])[0]

    def logits_batch(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Like `logits` for several sequences, which run side by side."""
        requests = [Request(token_ids, len(token_ids)) for token_ids in map(_token_ids, sequences)]
        try:
            with self._guests, self._lock:
                for request in requests:
                    self._add(request)
            for request in requests:
                self._run_until(request, partial(_has_ended, request))
        finally:
            self._end(requests)
        if any(request.finish_reason != "stop" for request in requests):
            raise PyllmError("the computation of logits was interrupted")
        return [np.concatenate(request.logits) for request in requests]

    def stream_logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Like `logits`, in pieces: [consecutive positions, vocab_size] as they come, and none of them kept here.

        Ends early when it is interrupted.
        """
        token_ids = _token_ids(ids)
        request = Request(token_ids, len(token_ids))
        taken = 0
        try:
            self._add(request)
            while taken < len(request.token_ids):
                self._run_until(request, partial(_has_more_logits, request, taken))
                if request.num_logits <= taken:
                    return
                yield (rows := request.take_logits(taken))
                taken += len(rows)
        finally:
            self._end([request])

    def _stream(self, request: Request, progress: PrefillProgress | None = None) -> Iterator[Chunk]:
        generation = Generation(request, self.tokenizer, self._end_one)
        try:
            self._add(request)
            while True:
                self._run_until(request, lambda: generation.has_news, None if request.num_generated else progress)
                chunk = generation.take()
                assert chunk is not None
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            generation.close()

    def _run_until(
        self, request: Request, reached: Callable[[], object], progress: PrefillProgress | None = None
    ) -> None:
        """Step the engine until a request has got somewhere; all other open requests move on too."""
        while not reached():
            with self._lock:
                if not reached() and not self._scheduler.step() and not reached():  # another thread may step for us
                    raise PyllmError("the engine has nothing to do, but an answer is not complete: please report this")
            self._guests.give_way()
            if progress is not None and request.kv is not None:
                progress(min(request.kv.num_clean, request.num_prompt), request.num_prompt, request.num_cached)
        if request.error is not None and not request.emitted:
            raise request.error

    def _end_one(self, request: Request, reason: str) -> None:
        self._end([request], reason)

    def _end(self, requests: Sequence[Request], reason: str = "cancelled") -> None:
        # Perhaps called by the garbage collector, in the middle of a step of this very thread: no waiting here.
        for request in requests:
            self._scheduler.end(request, reason)
            if self._kept is not None:
                self._kept.end(request)
            # Of hundreds that end together nobody asks for more than one's; but one without a sampler has large logits.
            self._stats = request.stats if request.sampler is not None else partial(dict, request.stats())
        with deferred_interrupt():  # or nobody lets the lock go
            if self._lock.acquire(blocking=False):
                try:
                    self._scheduler.drop_ended()
                finally:
                    self._lock.release()

    def save_session(
        self,
        path: str | os.PathLike[str],
        token_ids: Sequence[int] | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> Session:
        """Write what is kept of a conversation to a file, from which this or another process goes on. Other sequences
        run meanwhile.

        Args:
            path: a file that was there is replaced when the new one is whole.
            token_ids: the conversation; default: prompt and answer of the request that ended last.
            chat: anything that JSON holds, for the program that loads it.

        Raises:
            UsageError: nothing of the conversation is kept, and there is no `chat`.
            SessionError: the file cannot be written.
        """
        ids = None if token_ids is None else _token_ids(token_ids)
        return self._require_kept().save(Path(path), ids, chat or {})

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Make the rows of a session file known: prompts that begin like its tokens go on from them.

        Raises:
            SessionError: the file is damaged, or of another model or type of rows; nothing has changed.
            ContextError: there is no room for its rows.
        """
        return self._require_kept().sessions.load(Path(path))

    def forget(self, token_ids: Sequence[int] | None = None) -> None:
        """Give up all that is kept of ended sequences, or all that begins like these tokens, to the end of their first
        page. Session files stay."""
        if self._kept is not None:
            self._kept.forget(None if token_ids is None else _token_ids(token_ids))

    def _require_kept(self) -> KeptPrompts:
        if self._kept is None:
            raise UsageError("sessions need what --no-cache turns off (prefix_cache=True); leave one of the two out")
        return self._kept

    def interrupt(self) -> None:
        """End all generations soon. Safe in a signal handler."""
        self._scheduler.interrupt()

    def forget_interrupt(self) -> None:
        """Drop an interrupt that met no generation, so that it does not end the next one."""
        with self._guests, self._lock:
            self._scheduler.step()

    def trace_kv(self) -> None:
        """Add the K/V rows of all running sequences to the trace, as they are once all queued work has run.

        Raises:
            UsageError: the engine writes no trace.
        """
        if self._trace is None:
            raise UsageError("the engine writes no K/V trace; open it with kv_trace=FILE")
        with self._guests, self._lock:
            for seq in self._scheduler.running_sequences():
                self._trace.note(seq)

    @property
    def stats(self) -> Mapping[str, Any]:
        """Counts and times of the request that ended last: prompt_tokens, of which cached_tokens were there already and
        evaluated_tokens were computed; generated_tokens, prefill_seconds, decode_seconds, finish_reason, seed;
        dropped_tokens, which had to give way when the context was full, shifted_tokens, those among them behind which
        rows were shifted, and recomputed, why they could not be, or None; bytes_moved between the device and what is
        kept in the host's memory, copies of other requests among them; restored_bytes that were brought back from there
        for this one. And "memory": of each kind of pinned memory that is in use ("pages", "checkpoints", "sessions")
        its bytes, high_water_bytes and budget_bytes."""
        memory = self._kept.memory() if self._kept is not None else {}
        stats = self._stats()
        return {**stats, "memory": memory} if stats else {}

    @property
    def weights(self) -> Weights:
        """The model's weights on the device. For benches and diagnostics; not to be written to."""
        return self._model.weights

    @property
    def sequence_bytes(self) -> Mapping[str, int]:
        """Device memory that is set aside for each sequence: "kv_rows" for a full context, and "recurrent_state"; and
        pinned memory of the host that is taken when it is needed: "checkpoint" for each checkpoint of such a state,
        "all_checkpoints" for those of all sequences at most."""
        recurrent = self._cache.recurrent
        return {
            "kv_rows": self._cache.num_bytes // self._n_seqs,
            "recurrent_state": recurrent.num_bytes // self._n_seqs if recurrent is not None else 0,
            "checkpoint": recurrent.bytes_per_checkpoint if recurrent is not None else 0,
            "all_checkpoints": recurrent.pool.stats()["budget_bytes"] if recurrent is not None else 0,
        }

    @property
    def keeps_prefixes(self) -> bool:
        """Whether rows and states of ended sequences are kept."""
        return self._kept is not None

    @property
    def device_name(self) -> str:
        """The device that was taken: "cpu", "gpu" or "emulated"."""
        return self._device.name

    @property
    def device_description(self) -> str:
        """The device for people: "cpu", "NVIDIA H200 (sm_90)"."""
        return self._device.description

    def close(self) -> None:
        """Wait until nothing runs, then free everything. Calling it twice is harmless; other threads may be generating,
        and are told."""
        if self._kept is not None:
            self._kept.close()
        self._device.abandon()
        with self._guests, self._lock:  # no other thread's step may still queue work for memory that goes away
            if self._trace is not None:
                self._trace.close()
            self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _token_ids(ids: Any) -> list[int]:
    """Token ids as a list of int; whether the vocabulary has them is checked before they are used."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise UsageError(f"a list of token ids is needed, not {type(ids).__name__}; see LLM.tokenize")
    try:
        return list(map(operator.index, ids))
    except TypeError as error:
        raise UsageError(f"token ids must be whole numbers: {error}") from None


def _has_more_logits(request: Request, taken: int) -> bool:
    return request.num_logits > taken or _has_ended(request)


def _has_ended(request: Request) -> bool:
    return request.finish_reason is not None
