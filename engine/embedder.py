"""Embedder: embeddings of texts, and how well documents answer a query, from the prompts' hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequest, PromptTooLong
from engine.input.input_processor import Prompt
from engine.input.tokenizer import Tokenizer
from engine.model.implementation import EncoderConfig
from engine.model.pooling import EmbeddingSpec, read_activation, read_embedding_spec
from engine.outputs import RequestOutput
from engine.sampling_params import Pooling, SamplingParams

RERANKER = "qwen3-reranker"  # start of the names of the models that the template below belongs to
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The template of Qwen3-Reranker's model card; its files do not contain it.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text."""

    vector: np.ndarray  # [dimensions] float32
    num_tokens: int
    num_cached_tokens: int = 0
    is_cut: bool = False  # whether only the beginning of the text was read

    @property
    def outputs(self) -> Embedding:
        """Itself: vLLM's output has its values one level deeper, as `outputs.embedding` or `outputs.data`."""
        return self

    @property
    def data(self) -> np.ndarray:
        return self.vector

    @property
    def embedding(self) -> list[float]:
        return self.vector.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Classification:
    """The probabilities of a reranker's answers "no" and "yes"."""

    probs: list[float]
    num_tokens: int

    @property
    def outputs(self) -> Classification:
        """Itself, as in vLLM."""
        return self

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document answers a query: a probability from a reranker, a cosine from an embedding model."""

    score: float
    num_tokens: int

    @property
    def outputs(self) -> Score:
        """Itself, as in vLLM."""
        return self


class Embedder:
    """Sends prompts through an engine as requests that are only prefilled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._spec: EmbeddingSpec | None = None

    @property
    def is_reranker(self) -> bool:
        """Whether the model's name says that it answers yes or no under Qwen3-Reranker's template."""
        return Path(self._engine.config.model).name.lower().startswith(RERANKER)

    async def embed(
        self, inputs: Sequence[Prompt], dimensions: int | None = None, *, name: str = "input",
        max_tokens: int | None = None, **options: Any,
    ) -> list[Embedding]:
        """Return the embedding of each text or list of token ids.

        Args:
            dimensions: cut vectors to this length, as far as the model's files allow it.
            name: the field of the inputs, for errors.
            max_tokens: texts are cut to this many tokens; -1: to as many as the model reads.
            options: of `Engine.generate`: the adapter, priority, cache_salt.

        Raises:
            InvalidRequest: the checkpoint's files do not say how embeddings are made; an input does not fit the
                model; `dimensions` is not allowed.
        """
        spec = await self._read_spec()
        if dimensions is not None:
            spec.check_dimensions(dimensions, self._engine.model_config.hidden_size)
        is_encoder = isinstance(self._engine.model_config, EncoderConfig)
        if spec.kind == "cls" and not is_encoder:
            raise InvalidRequest("pooling_mode=cls is for encoders; this model reads from left to right", "model")
        prompts = [spec.prompt + each if isinstance(each, str) else each for each in inputs]
        if spec.is_lowered:
            prompts = [each.lower() if isinstance(each, str) else each for each in prompts]
        cut: list[bool] = [False] * len(prompts)
        if max_tokens is not None:
            prompts, cut = await asyncio.to_thread(self._cut_prompts, prompts, max_tokens, spec.max_tokens)
        outputs = await self._pool(prompts, Pooling(spec.kind), spec.max_tokens, name, options)
        pooled = [_vector_of(output) for output in outputs]
        vectors = await asyncio.to_thread(lambda: [spec.finish(each, dimensions) for each in pooled])
        return [
            Embedding(vector, len(output.prompt_token_ids), output.num_cached_tokens, is_cut)
            for vector, output, is_cut in zip(vectors, outputs, cut, strict=True)
        ]

    async def score(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str | None = None, *,
        names: tuple[str, str] = ("query", "documents"), max_document_tokens: int | None = None,
        max_tokens: int | None = None, **options: Any,
    ) -> list[Score]:
        """Return how well each document answers its query.

        Args:
            queries: one for all documents, or one for each.
            instruction: what counts as an answer, for a reranker; default: that of the model card.
            names: the fields of both, for errors.
            max_document_tokens: of each document only the first tokens are read.
            max_tokens: as for `embed`; of a pair the longer text is cut.
            options: of `Engine.generate`: the adapter, priority, cache_salt.

        Raises:
            InvalidRequest: the lengths do not match, or the checkpoint is neither a reranker nor an embedding model.
        """
        if len(queries) not in (1, len(documents)):
            message = f"{len(queries)} queries for {len(documents)} documents; give one, or one for each"
            raise InvalidRequest(message, names[0])
        if max_document_tokens is not None:
            documents = await asyncio.to_thread(self._cut, documents, max_document_tokens)
        paired = list(queries) * (len(documents) if len(queries) == 1 else 1)
        if instruction is not None and not self.is_reranker:
            kind = "a cross-encoder" if self._num_labels else "an embedding model"
            raise InvalidRequest(f"instruction is for rerankers with a template; this is {kind}", "instruction")
        if self._num_labels:
            return await self._score_pairs(paired, documents, names, max_tokens, options)
        if self.is_reranker:
            if max_tokens is not None:
                raise InvalidRequest(
                    "truncate_prompt_tokens would cut this model's template; use max_tokens_per_doc",
                    "truncate_prompt_tokens",
                )
            chosen = INSTRUCTION if instruction is None else instruction
            return await self._judge(paired, documents, chosen, names[1], options)
        left = await self.embed(queries, name=names[0], max_tokens=max_tokens, **options)
        right = await self.embed(documents, name=names[1], max_tokens=max_tokens, **options)
        left *= len(right) if len(left) == 1 else 1
        return [
            Score(_cosine(one.vector, other.vector), one.num_tokens + other.num_tokens)
            for one, other in zip(left, right, strict=True)
        ]

    def _cut(self, documents: Sequence[str], max_tokens: int) -> list[str]:
        """Return the beginning of each document, as far as its first tokens go."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine was started without a tokenizer: it cannot count tokens", "documents")
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in documents]
        return [
            text if len(each) <= max_tokens else tokenizer.decode(each[:max_tokens]).rstrip("\ufffd")
            for text, each in zip(documents, ids, strict=True)
        ]

    def _cut_prompts(
        self, prompts: Sequence[Prompt], max_tokens: int, limit: int | None
    ) -> tuple[list[Prompt], list[bool]]:
        """Return the first tokens of each text or list of ids, and whether it had more."""
        most = self._limit(max_tokens, limit)
        found: list[Prompt] = []
        cut: list[bool] = []
        for each in prompts:
            if isinstance(each, str):
                ids, _, is_cut = self._require_tokenizer().encode_whole(each, max_tokens=most)
                found.append(ids)
            else:
                is_cut = not isinstance(each, Mapping) and len(each) > most
                found.append(each if isinstance(each, Mapping) else each[:most])
            cut.append(is_cut)
        return found, cut

    def _limit(self, max_tokens: int, limit: int | None) -> int:
        most = min(limit or self._engine.resolved.max_model_len, self._engine.resolved.max_model_len)
        return most if max_tokens == -1 else min(max_tokens, most)

    def _require_tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise InvalidRequest("this engine was started without a tokenizer: send token ids", "model")
        return self._engine.tokenizer

    @property
    def _num_labels(self) -> int:
        """Number of scores that a cross-encoder gives a pair; 0: the model is none."""
        config = self._engine.model_config
        return config.num_labels if isinstance(config, EncoderConfig) else 0

    async def _score_pairs(
        self, queries: Sequence[str], documents: Sequence[str], names: tuple[str, str], max_tokens: int | None,
        options: Mapping[str, Any],
    ) -> list[Score]:
        """Return what a cross-encoder says of each pair, under the activation that its files name."""
        if self._num_labels != 1:
            raise InvalidRequest(
                f"this classifier has {self._num_labels} labels; pairs are scored by a model with one", "model"
            )
        tokenizer, is_sigmoid = self._require_tokenizer(), await asyncio.to_thread(self._read_activation)
        most = None if max_tokens is None else self._limit(max_tokens, None)
        pairs = await asyncio.to_thread(
            lambda: [tokenizer.encode_whole(*pair, most) for pair in zip(queries, documents, strict=True)]
        )
        prompts = [ids for ids, _, _ in pairs]
        poolings = [Pooling("labels", second_start=start) for _, start, _ in pairs]
        found = []
        for output in await self._pool(prompts, poolings, None, names[1], options):
            logit = float(_vector_of(output)[0])
            score = float(1 / (1 + np.exp(-logit))) if is_sigmoid else logit
            found.append(Score(score, len(output.prompt_token_ids)))
        return found

    def _read_activation(self) -> bool:
        """Whether the scores of the cross-encoder are sigmoids of its logits."""
        try:
            return read_activation(self._engine.config.model)
        except ConfigError as error:
            raise InvalidRequest(f"this model scores no pairs: {error}", "model") from error

    async def _judge(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str, name: str,
        options: Mapping[str, Any],
    ) -> list[Score]:
        """Return the probability of "yes" against "no" after Qwen3-Reranker's template."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                "this engine was started without a tokenizer: it cannot write the template", "query"
            )
        texts = [
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            for query, document in zip(queries, documents, strict=True)
        ]
        prompts = await asyncio.to_thread(
            lambda: [tokenizer.encode_framed(_BEFORE, text, _AFTER) for text in texts]
        )
        found = await self._compare(prompts, tokenizer, name, options)
        return [Score(each.probs[1], each.num_tokens) for each in found]

    async def classify(self, prompts: Sequence[Prompt], **options: Any) -> list[Classification]:
        """Return the probabilities of "no" and "yes" after each prompt, which must be in the reranker's template.

        Raises:
            InvalidRequest: the model is not a reranker.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not self.is_reranker:
            raise InvalidRequest("this model does not classify: it is not a reranker with a tokenizer", "model")
        return await self._compare(prompts, tokenizer, "prompt", options)

    async def _compare(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer, name: str, options: Mapping[str, Any]
    ) -> list[Classification]:
        answers = Pooling("logits", (_find_token(tokenizer, "no"), _find_token(tokenizer, "yes")))
        found = []
        for output in await self._pool(prompts, answers, None, name, options):
            no, yes = _vector_of(output).astype(np.float64)
            share = float(1 / (1 + np.exp(no - yes)))
            found.append(Classification([1 - share, share], len(output.prompt_token_ids)))
        return found

    async def _pool(
        self, prompts: Sequence[Prompt], pooling: Pooling | Sequence[Pooling], max_tokens: int | None, name: str,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        """Run the prompts, at most a batch at a time. If one is refused, by its number, the others are aborted."""
        # One token is sampled and dropped: the end of its prompt ends the request.
        poolings = [pooling] * len(prompts) if isinstance(pooling, Pooling) else pooling
        common = SamplingParams(max_tokens=1, temperature=0, output_kind="final", detokenize=False)
        room = asyncio.Semaphore(self._engine.resolved.scheduler.max_num_seqs)

        async def run_one(number: int, prompt: Prompt) -> RequestOutput:
            async with room:
                try:
                    return await run_checked(prompt, replace(common, pooling=poolings[number]))
                except InvalidRequest as error:
                    if error.param != "prompt":
                        raise
                    place = f"{name}[{number}]" if len(prompts) > 1 else name
                    rest = str(error).removeprefix("prompt").removeprefix(": ")
                    joint = " " if rest.startswith(" ") else ": "
                    raise type(error)(f"{place}{joint}{rest.lstrip()}", name) from error

        async def run_checked(prompt: Prompt, params: SamplingParams) -> RequestOutput:
            if max_tokens is not None and isinstance(prompt, str):
                prompt = await self._engine.encode(prompt)
            if max_tokens is not None and not isinstance(prompt, str) and len(prompt) > max_tokens:
                message = f"prompt has {len(prompt)} tokens; max_seq_length of this model is {max_tokens}"
                raise PromptTooLong(message, "prompt")
            outputs = self._engine.generate(prompt, params, **options)
            return [output async for output in outputs][-1]

        try:
            async with asyncio.TaskGroup() as tasks:
                jobs = [tasks.create_task(run_one(number, prompt)) for number, prompt in enumerate(prompts)]
        except ExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        return [job.result() for job in jobs]

    async def _read_spec(self) -> EmbeddingSpec:
        if self._spec is None:
            try:
                spec = await asyncio.to_thread(read_embedding_spec, self._engine.config.model)
                spec.check_layers(self._engine.model_config.hidden_size)
            except ConfigError as error:
                raise InvalidRequest(f"this model makes no embeddings: {error}", "model") from error
            self._spec = spec
        return self._spec


def _vector_of(output: RequestOutput) -> np.ndarray:
    if output.pooled is None:
        raise InvalidRequest(f"the request ended without a vector: {output.outputs[0].error}", "input")
    return output.pooled


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    left, right = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(left @ right) / max(lengths, 1e-24)


def _find_token(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequest(
            f"{word!r} is not one token of this model, so it is not a yes/no reranker", "model"
        )
    return ids[0]
