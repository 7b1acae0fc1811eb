"""Language models behind an OpenAI-compatible endpoint: asked within limits, every exchange kept.

Off unless an address is set. An answer is data and nothing else; what fails is an empty answer, never an
exception.
"""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from torchstone import settings
from torchstone.errors import InputError
from torchstone.records import Record

__all__ = [
    "UNREADABLE",
    "Exchange",
    "OpenAIProposer",
    "Proposer",
    "Replayed",
    "from_settings",
    "one_line",
]

_BYTES = 262_144
UNREADABLE = (ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""What reading an answer may raise, whatever it says."""


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
        except (OSError, http.client.HTTPException, *UNREADABLE) as failure:
            error = one_line(self._hidden(f"{type(failure).__name__}: {failure}"))
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


def _digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def one_line(text: str) -> str:
    """At most 160 characters of a text, in one line."""
    return " ".join(text[:640].split())[:160]
