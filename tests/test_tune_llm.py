"""Proposals of a language model, from a real HTTP server on loopback: an answer is data."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone import settings as environment
from torchstone.errors import InputError
from torchstone.llm import Exchange, OpenAIProposer, Proposer, Replayed, from_settings
from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.driver import Budget, Found, search
from torchstone.tuner.replay import ReplayMeasurer, problem_of
from torchstone.tuner.search.base import Problem, Proposal
from torchstone.tuner.search.llm import LLM
from torchstone.tuner.search.pattern import Pattern
from torchstone.tuner.search.random import Random
from torchstone.tuner.space import key_of
from tune_samples import SPACE, Fixed, rare, table

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

KEY = "sk-test-0123456789"
Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Endpoint:
    """A server that answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.reply: Reply = said("[]")
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append({**body, "path": self.path})
                endpoint.headers.append(dict(self.headers))
                endpoint.reply(self, body)

            def do_GET(self) -> None:  # what a redirect becomes
                endpoint.headers.append(dict(self.headers))
                said("redirected")(self, {})

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


def sent(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def said(content: object, tokens: int | None = None) -> Reply:
    reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    if tokens is not None:
        reply["usage"] = {"total_tokens": tokens}
    return lambda handler, _: sent(handler, json.dumps(reply).encode())


def drip(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """A byte now and then, so that no single read is slow."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Endpoint()
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()


def wanted(**changes: Any) -> Config:
    return {**SPACE.default(), "M": 128, "N": 64, **changes}


def asked(proposer: Proposer, count: int = 8) -> tuple[list[Config], Any]:
    """What of one batch the model has proposed, and the state."""
    searcher = LLM(proposer, Random())
    made, state = searcher.ask(searcher.init(Problem(SPACE), 0), count)
    assert len(made) == count, "the other searcher fills the batch"
    assert key_of(made[0].config) == key_of(SPACE.default())
    assert len({key_of(p.config) for p in made}) == count
    return [p.config for p in made if p.by == "llm"], state


def lines(path: Path) -> list[Exchange]:
    return [msgspec.json.decode(line, type=Exchange) for line in path.read_bytes().splitlines()]


def test_good_answers_are_proposed_and_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    configs = [wanted(stages=s) for s in (2, 3, 4)]
    endpoint.reply = said(f"Here you are:\n```json\n{json.dumps(configs)}\n```\nGood luck!", tokens=77)
    proposer = OpenAIProposer(endpoint.url, "small", KEY, transcript=tmp_path / "said.jsonl")
    proposed, _ = asked(proposer)
    assert proposed == configs
    (request,) = endpoint.asked
    assert request["path"] == "/v1/chat/completions"
    assert request["model"] == "small"
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    (exchange,) = lines(tmp_path / "said.jsonl")
    assert (exchange.model, exchange.tokens, exchange.error) == ("small", 77, "")
    assert json.dumps(configs) in exchange.answer


def test_the_prompt_says_what_is_known(endpoint: Endpoint) -> None:
    features = {"n": 4096.0, "bandwidth": 4e12}
    problem = Problem(SPACE.restricted(rare), features, floor_s=5e-5, about="sample of a matrix")
    rare.__doc__ = "By its text."
    searcher = LLM(OpenAIProposer(endpoint.url, "small"), Random())
    state = searcher.init(problem, 0)
    told = [
        Measurement(config=wanted(), status="timed", seconds=(7.3e-5,)),
        Measurement(config=wanted(M=256), status="wrong", text="3% of\nelements"),
    ]
    searcher.ask(searcher.tell(state, told), 8)
    text = endpoint.asked[0]["messages"][0]["content"]
    for part in (
        "sample of a matrix",
        '"M": one of [16, 32, 64, 128, 256]',
        '"k": one of [1, 2, 4, 8], if split is among [true]',
        "By its text.",
        '"bandwidth": 4000000000000.0',
        "50 us",
        f"73 us {key_of(wanted())}",
        f"wrong {key_of(wanted(M=256))} 3% of elements",
        "a JSON list of 7 new configs",
    ):
        assert part in text


@pytest.mark.parametrize(
    "content",
    [
        "I cannot do that.",
        "",
        None,
        "[" * 100_000,
        '[{"M": ' + "[" * 90_000,
        '[{"M": ' + "9" * 5_000 + "}]",
        '{"M": 16}',
        "[1, 2, 3]",
        '[{"M": NaN, "N": Infinity}]',
        "\ud800[{}]",
    ],
)
def test_nonsense_is_no_proposal(endpoint: Endpoint, content: str | None) -> None:
    endpoint.reply = said(content)
    proposed, state = asked(OpenAIProposer(endpoint.url, "small"))
    assert proposed == []
    assert state.calls == 1


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (lambda h, _: sent(h, b"busy", 500), "HTTP Error 500"),
        (lambda h, _: sent(h, b"", 429), "HTTP Error 429"),
        (lambda h, _: sent(h, b"<html>"), "DecodeError"),
        (lambda h, _: sent(h, b"\xff\xfe"), "Error"),
        (lambda h, _: sent(h, b"[" * 200_000), "RecursionError"),
        (lambda h, _: sent(h, b"{}"), "KeyError"),
        (lambda h, _: sent(h, b"[]"), "AttributeError"),
        (lambda h, _: sent(h, b'{"choices": []}'), "IndexError"),
        (lambda h, _: sent(h, b'{"choices": [{"message": 3}]}'), "TypeError"),
        (lambda h, _: sent(h, b'{"choices": [{"message": {"content": ""}}]}'), "empty"),
        (lambda h, _: sent(h, b" " * 300_000 + b"{}"), "more than 262144 bytes"),
        (lambda h, _: h.wfile.write(b"what?\r\n\r\n"), "BadStatusLine"),
        (lambda h, _: h.connection.close(), "RemoteDisconnected"),
        (lambda h, _: sent(h, b"", 302, Location="file:///etc/hostname"), "302"),
        (lambda h, _: time.sleep(0.6), "imed out"),
        (drip, "imed out"),
    ],
)
def test_failures_are_kept_and_the_search_goes_on(
    endpoint: Endpoint, tmp_path: Path, reply: Reply, error: str
) -> None:
    endpoint.reply = reply
    path = tmp_path / "said.jsonl"
    began = time.monotonic()
    proposed, _ = asked(OpenAIProposer(endpoint.url, "small", KEY, timeout_s=0.3, transcript=path))
    assert proposed == []
    assert time.monotonic() - began < 4
    (exchange,) = lines(path)
    assert error in exchange.error
    assert exchange.answer == ""
    assert KEY not in path.read_text()


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    assert OpenAIProposer("http://127.0.0.1:9/v1", "small", transcript=path).propose("?") == ""
    assert "refused" in lines(path)[0].error


def test_what_is_not_valid_is_counted_and_told(endpoint: Endpoint) -> None:
    bad = [wanted(M=17), {"M": 16}, wanted(extra=1), "M=16", wanted(order="; rm -rf /"), wanted(N=None)]
    good, twice = wanted(stages=2), wanted(stages=2)
    endpoint.reply = said(json.dumps([*bad, good, twice, SPACE.default()]))
    proposed, state = asked(OpenAIProposer(endpoint.url, "small"), count=12)
    assert proposed == [good]
    assert len(state.refused) == len(bad)
    assert "M cannot be 17" in state.refused
    LLM(OpenAIProposer(endpoint.url, "small"), Random()).ask(state, 8)
    assert "; rm -rf /" in endpoint.asked[-1]["messages"][0]["content"]


def test_a_value_is_read_as_the_knob_has_it(endpoint: Endpoint) -> None:
    endpoint.reply = said(json.dumps([{**wanted(), "M": "128", "split": "True", "k": 4.0}]))
    (config,) = asked(OpenAIProposer(endpoint.url, "small"))[0]
    assert config == wanted(split=True, k=4)
    assert SPACE.why_not(config) is None


@pytest.mark.parametrize("where", ["answer", "error"])
def test_the_key_is_in_no_record(endpoint: Endpoint, tmp_path: Path, where: str) -> None:

    def refused(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        handler.send_response(500, f"not {KEY}")
        handler.end_headers()

    endpoint.reply = said(f"your key is {KEY}") if where == "answer" else refused
    path = tmp_path / "said.jsonl"
    proposer = OpenAIProposer(endpoint.url, "small", KEY, transcript=path)
    answer = proposer.propose("?")
    assert "***" in path.read_text()
    assert KEY not in path.read_text() + answer + repr(proposer) + repr(LLM(proposer, Random()))


def test_a_redirect_does_not_get_the_key(endpoint: Endpoint) -> None:
    endpoint.reply = lambda h, _: sent(
        h, b"", 302, Location=endpoint.url.replace("127.0.0.1", "localhost")
    )
    OpenAIProposer(endpoint.url, "small", KEY).propose("?")
    assert [h.get("Authorization") for h in endpoint.headers][1:] in ([], [None])


def test_calls_and_tokens_are_budgeted(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    endpoint.reply = said("[]", tokens=600)
    proposer = OpenAIProposer(endpoint.url, "small", max_calls=2, transcript=path)
    for text in "abcd":
        proposer.propose(text)
    assert len(endpoint.asked) == 2
    frugal = OpenAIProposer(endpoint.url, "small", max_tokens=1_000, transcript=path)
    for text in "abcd":
        frugal.propose(text)
    assert len(endpoint.asked) == 4
    assert [r["max_tokens"] for r in endpoint.asked[2:]] == [1_000, 400]
    assert sum("budget" in e.error for e in lines(path)) == 4


def test_a_model_without_answers_is_given_up(endpoint: Endpoint) -> None:
    endpoint.reply = lambda h, _: sent(h, b"", 500)
    found(OpenAIProposer(endpoint.url, "small"))
    assert len(endpoint.asked) == 2


def found(proposer: Proposer) -> Found:
    recorded = table()
    searcher = LLM(proposer, Pattern(), about="sample")
    measurer = ReplayMeasurer(recorded, 0)
    return search(problem_of(recorded), searcher, measurer, Budget(measurements=64), seed=1)


def learner(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Answers differently each time: by the prompt's length."""
    size = len(body["messages"][0]["content"])
    said(json.dumps([wanted(stages=1 + (size + i) % 6, order="column", split=True) for i in range(4)]))(
        handler, {}
    )


def test_a_search_is_replayed_without_the_endpoint(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.reply = learner
    path = tmp_path / "said.jsonl"
    live = found(OpenAIProposer(endpoint.url, "small", KEY, transcript=path))
    calls = len(endpoint.asked)
    assert calls == len(lines(path)) == 4
    by = [m.proposer for m in live.measurements]
    assert by.count("llm") >= 4
    assert {"default", "llm", "neighbour"} <= set(by)
    assert live.best is not None
    assert live.best.time is not None
    assert live.best.time < 0.5 * (live.measurements[0].time or 0.0)
    with path.open("ab") as file:
        file.write(b'{"digest": "cut o')
    again = found(Replayed(path))
    assert len(endpoint.asked) == calls
    assert [(m.config, m.proposer) for m in again.measurements] == [
        (m.config, m.proposer) for m in live.measurements
    ]


def test_a_damaged_transcript_is_told(tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    path.write_text('{"digest": 3}\n')
    with pytest.raises(InputError, match="not a transcript"):
        Replayed(path)
    with pytest.raises(InputError, match="not a transcript"):
        Replayed(tmp_path / "none.jsonl")
    path.write_text("")
    assert Replayed(path).propose("?") == ""


def test_asking_twice_asks_the_endpoint_once(endpoint: Endpoint) -> None:
    endpoint.reply = learner
    searcher = LLM(OpenAIProposer(endpoint.url, "small"), Random())
    state = searcher.init(Problem(SPACE), 0)
    assert searcher.ask(state, 8) == searcher.ask(state, 8)
    assert len(endpoint.asked) == 1


def test_the_environment_names_the_endpoint(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "MODEL", "KEY"):
        monkeypatch.delenv(f"TORCHSTONE_LLM_{name}", raising=False)
    assert from_settings() is None
    monkeypatch.setenv("TORCHSTONE_LLM_URL", endpoint.url)
    with pytest.raises(InputError, match="no model"):
        from_settings()
    monkeypatch.setenv("TORCHSTONE_LLM_MODEL", "small")
    monkeypatch.setenv("TORCHSTONE_LLM_KEY", KEY)
    proposer = from_settings()
    assert proposer is not None
    assert proposer.propose("?") == "[]"
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(environment.load())
    assert "TORCHSTONE_LLM_KEY" in os.environ
    assert "TORCHSTONE_LLM_KEY" not in environment.child_environment(A="1")


@pytest.mark.parametrize(("url", "key"), [("file:///etc/hostname", None), ("http://h/v1", "two\nlines")])
def test_what_cannot_be_sent_is_refused(url: str, key: str | None) -> None:
    with pytest.raises(InputError) as error:
        OpenAIProposer(url, "small", key)
    assert "lines" not in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
configs = st.fixed_dictionaries(
    {name: st.sampled_from(knob.values) | json_values for name, knob in SPACE.knobs.items()}
)


@given(st.lists(configs | json_values, max_size=6).map(json.dumps) | st.text(max_size=40))
@settings(deadline=None)
def test_whatever_is_answered_all_that_is_proposed_is_valid(answer: str) -> None:
    searcher = LLM(Fixed(answer), Random())
    made, _ = searcher.ask(searcher.init(Problem(SPACE), 0), 8)
    assert len({key_of(p.config) for p in made}) == len(made) == 8
    assert all(isinstance(p, Proposal) and SPACE.why_not(p.config) is None for p in made)
