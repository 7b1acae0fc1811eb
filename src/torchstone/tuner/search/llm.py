"""Proposals of a language model, mixed with those of another searcher.

An answer is data: a JSON list of configs, each read by :meth:`~torchstone.tuner.space.Space.read`,
measured and proved like any other. An endpoint that fails costs proposals, never a search.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from torchstone import settings
from torchstone.errors import InputError
from torchstone.records import Record
from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.search.base import AnySearcher, Problem, Proposal, Seen, Stop
from torchstone.tuner.search.random import opening
from torchstone.tuner.space import Only, Space, key_of

__all__ = ["LLM", "Exchange", "LLMState", "OpenAIProposer", "Proposer", "Replayed", "from_settings"]

_BYTES = 262_144
_SHOWN = 24
_SILENT = 2
_UNREADABLE = (ValueError, RecursionError, LookupError, TypeError, AttributeError)


class Proposer(Protocol):
    """Answers prompts, the same prompt always the same; an empty answer means that it has none."""

    def propose(self, prompt: str) -> str:
        """The answer; never raises."""


class Exchange(Record, frozen=True, kw_only=True):
    """A line of a transcript: one answer. Never the key, and of the prompt its digest only."""

    digest: str
    """SHA-256 of the prompt."""
    model: str
    """Who was asked."""
    answer: str = ""
    """What it said."""
    seconds: float = 0.0
    """How long it took."""
    tokens: int = 0
    """Of prompt and answer, as the endpoint counts; a quarter of the characters if it does not say."""
    error: str = ""
    """Why there is no answer."""


class Replayed:
    """Answers from a transcript, without an endpoint; to prompts that are not in it, nothing.

    :raises InputError: where it is no transcript. A last line cut off by a kill is passed over.
    """

    def __init__(self, path: Path) -> None:
        try:
            lines = [n for n in path.read_bytes().splitlines(keepends=True) if n.endswith(b"\n")]
            told = [msgspec.json.decode(line, type=Exchange) for line in lines]
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"not a transcript of proposals: {error}", where=path) from None
        self._answers = {exchange.digest: exchange.answer for exchange in told}

    def propose(self, prompt: str) -> str:
        """What was answered then."""
        return self._answers.get(_digest(prompt), "")


@dataclass(eq=False)
class OpenAIProposer:
    """Any endpoint that speaks ``/chat/completions``.

    :param url: what comes before that: ``http://localhost:8000/v1``.
    :param key: a bearer token, sent to this URL and to no other; in no record.
    :param timeout_s: limit of one call, seconds.
    :param max_calls: limit of calls, failing ones included.
    :param max_tokens: no call is made once these are spent, by all calls together.
    :param transcript: a file to append each :class:`Exchange` to, as a line of JSON.
    :raises InputError: where the URL is none of HTTP, or the key cannot be sent.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    max_calls: int = 8
    max_tokens: int = 200_000
    transcript: Path | None = None

    def __post_init__(self) -> None:
        if not self.url.lower().startswith(("http://", "https://")):
            raise InputError(f"the URL of a language model: {self.url!r}", hint="http://HOST:PORT/v1")
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise InputError("the key of a language model is no header: it holds odd characters")
        self._calls = self._tokens = 0
        self._answers: dict[str, str] = {}

    def propose(self, prompt: str) -> str:
        """The endpoint's answer; empty where it gives none, or a budget is spent."""
        digest = _digest(prompt)
        if digest not in self._answers:
            exchange = self._asked(prompt, digest)
            self._answers[digest] = exchange.answer
            if self.transcript is not None:
                with self.transcript.open("ab") as file:
                    file.write(msgspec.json.encode(exchange) + b"\n")
        return self._answers[digest]

    def _asked(self, prompt: str, digest: str) -> Exchange:
        if self._calls >= self.max_calls or self._tokens >= self.max_tokens:
            return Exchange(digest=digest, model=self.model, error="the budget is spent")
        self._calls += 1
        began, answer, error, counted = time.monotonic(), "", "", 0
        try:
            reply = msgspec.json.decode(self._post(prompt))
            counted = int((reply.get("usage") or {}).get("total_tokens") or 0)
            answer = self._hidden(str(reply["choices"][0]["message"]["content"] or ""))
            error = "" if answer else "an empty answer"
        except (OSError, http.client.HTTPException, *_UNREADABLE) as failure:
            error = _line(self._hidden(f"{type(failure).__name__}: {failure}"))
        tokens = counted if counted > 0 else (len(prompt) + len(answer)) // 4
        self._tokens += tokens
        seconds = time.monotonic() - began
        return Exchange(
            digest=digest, model=self.model, answer=answer, seconds=seconds, tokens=tokens, error=error
        )

    def _hidden(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text  # an endpoint may echo it

    def _post(self, prompt: str) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": min(8_192, self.max_tokens - self._tokens),
            "temperature": 0.0,
        }
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        request = urllib.request.Request(base + "/chat/completions", data=msgspec.json.encode(body))
        request.add_unredirected_header("Content-Type", "application/json")
        if self.key:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        until, read = time.monotonic() + self.timeout_s, b""
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            while chunk := response.read1(65_536):
                read += chunk
                if len(read) > _BYTES:
                    raise ValueError(f"an answer of more than {_BYTES} bytes")
                if time.monotonic() > until:  # the socket's own limit is of each read
                    raise TimeoutError("timed out while it answered")
        return read


def from_settings(transcript: Path | None = None) -> Proposer | None:
    """The endpoint that the environment names; None where it names none.

    :raises InputError: where it names no model.
    """
    found = settings.load()
    if found.llm_url is None:
        return None
    if found.llm_model is None:
        raise InputError("TORCHSTONE_LLM_URL names no model", hint="set TORCHSTONE_LLM_MODEL too")
    return OpenAIProposer(found.llm_url, found.llm_model, found.llm_key, transcript=transcript)


@dataclass(frozen=True)
class LLMState:
    """What was proposed by both, and how the model fares."""

    problem: Problem
    seen: Seen
    inner: Any
    """The other searcher's state."""
    calls: int = 0
    """How often the model was asked."""
    silent: int = 0
    """How often in a row it had no answer."""
    refused: tuple[str, ...] = ()
    """Why configs that it proposed were not valid: one sentence each."""


@dataclass(frozen=True)
class LLM:
    """The first batch from a language model, a share of the next few; the rest from another searcher.

    :param about: what is tuned, in words: the kernel's name, or its source.
    :param calls: how many batches the model takes part in; after two without an answer it is given up.
    :param share: its share of a batch that is not the first.
    """

    proposer: Proposer
    inner: AnySearcher
    about: str = ""
    calls: int = 4
    share: float = 0.5
    name: str = "llm"

    def init(self, problem: Problem, seed: int) -> LLMState:
        """The first state."""
        return LLMState(problem, Seen(seed), self.inner.init(problem, seed))

    def ask(self, state: LLMState, count: int) -> tuple[tuple[Proposal, ...], LLMState]:
        """What the model proposes, then what the other searcher does."""
        made = opening(state.problem.space, state.seen)[:count]
        taken = set(state.seen.keys) | {key_of(p.config) for p in made}
        room = count - len(made)
        if room and state.calls < self.calls and state.silent < _SILENT:
            wanted = room if state.calls == 0 else max(1, int(room * self.share))
            answer = self.proposer.propose(_prompt(state, wanted, self.about))
            configs, refused = _parsed(answer, state.problem.space, 4 * wanted)
            fresh = {key_of(c): c for c in configs if key_of(c) not in taken}
            made += [Proposal(c, self.name) for c in list(fresh.values())[:wanted]]
            taken |= {key_of(p.config) for p in made}
            silent = 0 if answer else state.silent + 1
            refused = (*state.refused, *refused)
            state = replace(state, calls=state.calls + 1, silent=silent, refused=refused)
        inner = state.inner
        while len(made) < count:
            more, inner = self.inner.ask(inner, count - len(made))
            if not more:
                break
            made += [p for p in more if key_of(p.config) not in taken]
        return tuple(made), replace(state, seen=state.seen.after(made), inner=inner)

    def tell(self, state: LLMState, found: Sequence[Measurement]) -> LLMState:
        """Tells the other searcher too."""
        return replace(state, seen=state.seen.hearing(found), inner=self.inner.tell(state.inner, found))

    def done(self, state: LLMState) -> Stop | None:
        """When the other searcher has had enough."""
        return self.inner.done(state.inner)


def _parsed(answer: str, space: Space, limit: int) -> tuple[list[Config], tuple[str, ...]]:
    """Valid configs of the last JSON list of objects, and why the others are not; ``limit`` are read."""
    listed: list[Any] = []
    for match in list(re.finditer(r"\[\s*\{", answer))[-8:]:
        try:
            listed = json.JSONDecoder().raw_decode(answer, match.start())[0]
        except (ValueError, RecursionError):  # no JSON, or deeper than any config
            continue
    configs, refused = [], []
    for one in listed[:limit]:
        try:
            configs.append(space.read(one if isinstance(one, dict) else {}))
        except (InputError, RecursionError) as error:
            refused.append(_line(getattr(error, "what", "nested too deep")))
    return configs, tuple(refused)


def _prompt(state: LLMState, wanted: int, about: str) -> str:
    """What the model is asked: the space, the sizes and the device, what was measured."""
    problem, told = state.problem, state.seen.told
    timed = sorted((m for m in told if m.time is not None), key=lambda m: m.time or 0.0)
    failed = [m for m in told if m.time is None]
    rows = [f"{(m.time or 0.0) * 1e6:.4g} us {key_of(m.config)}" for m in timed]
    floor = [f"{problem.floor_s * 1e6:.4g} us"] if problem.floor_s else []
    features = [json.dumps(dict(problem.features))] if problem.features else []
    parts: dict[str, Sequence[str]] = {
        "Kernel:": [about] if about else [],
        "Knobs:": [_knob(problem.space, name) for name in problem.space.knobs],
        "Rules:": [_line(c.__doc__) for c in problem.space.valid if c.__doc__],
        "Sizes and device:": features,
        "No config can take less than:": floor,
        "Default:": [key_of(problem.space.default())],
        f"Quickest of {len(timed)}:": rows[:8],
        "Slowest:": rows[8:][-3:],
        f"Last of {len(failed)} that failed:": [
            f"{m.status} {key_of(m.config)} {_line(m.text)}" for m in failed[-5:]
        ],
        "Proposed, but not valid:": state.refused[-5:],
    }
    text = "\n".join("\n".join([title, *lines]) for title, lines in parts.items() if lines)
    return (
        f"Tune a kernel: find the config that takes the least time.\n{text}\n"
        f"Answer with a JSON list of {wanted} new configs, best first, each an object with all knobs."
    )


def _knob(space: Space, name: str) -> str:
    knob, values = space.knobs[name], space.knobs[name].values
    last = f" and so on to {json.dumps(values[-1])}" if len(values) > _SHOWN else ""
    only = f", if {knob.on} is among {json.dumps(knob.among)}" if isinstance(knob, Only) else ""
    return f"{json.dumps(name)}: one of {json.dumps(values[:_SHOWN])}{last}{only}"


def _line(text: str) -> str:
    """At most 160 characters of a text, in one line."""
    return " ".join(text[:640].split())[:160]


def _digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()
