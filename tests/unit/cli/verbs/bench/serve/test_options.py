"""Options of `bench serve`: what is left out, what contradicts, and that no report repeats a key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inferplane.cli.main import verb_parser
from inferplane.cli.verbs.bench.serve.address import parse_url
from inferplane.cli.verbs.bench.serve.options import read_options
from inferplane.cli.verbs.bench.serve.presets import apply_preset
from inferplane.errors import UsageError


def options(*words: str):
    return read_options(apply_preset(verb_parser("bench serve")[0].parse_all(list(words))))


@pytest.mark.parametrize(
    ("words", "means"),
    [
        ("http://h", "http://h"),
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:80/", "http://h"),
        ("https://h/v1", "https://h"),
        ("https://h:8443/a/b/v1/", "https://h:8443/a/b"),
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("http://h:1/x/v1/completions", "http://h:1/x"),
        ("http://[::1]:5", "http://[::1]:5"),
        (" http://h:1 ", "http://h:1"),
        ("grpc://h:1", "grpc://h:1"),
        ("grpcs://h:1/", "grpcs://h:1"),
        ("http://ex\xe4mple.com/\xfc%20a/v1", "http://xn--exmple-cua.com/%C3%BC%20a"),
    ],
)
def test_urls(words, means):
    assert str(parse_url(words)) == means


@pytest.mark.parametrize(
    "words",
    [
        *("", "http://", "ftp://h", "http://h:x", "http://h:99999", "http://u:p@h", "http://h?a=1", "http://h#a"),
        *("grpc://h", "grpc://h:1/path", "http://h h", "http://h\x01", "http://h:1/a b"),
        *("http://[::1", "http://ex\xe4mple..com", "http://a..b", "http://" + "a" * 64, "http://h:0", "grpc://h:0"),
    ],
)
def test_urls_that_are_none(words):
    with pytest.raises(UsageError, match="--url"):
        parse_url(words)


@pytest.mark.parametrize(
    ("words", "message"), [("http://h:0", "the port 0"), ("http://h:1/a b", "a blank"), ("http://", "names no host")]
)
def test_what_is_wrong_with_a_url_is_said(words, message):
    with pytest.raises(UsageError, match=message):
        parse_url(words)


def test_what_is_left_out():
    found = options()
    (level,) = found.levels
    assert str(found.address) == "http://localhost:8000" and found.endpoint == "chat" and found.headers == ()
    assert (level.concurrency, level.rate, level.max_requests, level.duration_s) == (8, None, 200, None)
    assert options("--duration", "5").levels[0].max_requests is None
    assert options("--url", "grpc://h:1").endpoint == "grpc"
    (rate,) = options("--request-rate", "2").levels
    assert rate.concurrency is None and str(rate.rate) == "2" and str(rate.process) == "poisson"


def test_levels():
    assert [p.concurrency for p in options("--max-concurrency", "1,2,8").levels] == [1, 2, 8]
    ramp, other = options("--rate", "1:4,8", "--concurrency", "16").levels
    assert (str(ramp.rate), ramp.concurrency, other.concurrency) == ("1:4", 16, 16) and ramp.seed != other.seed
    assert [p.label for p in (ramp, other)] == ["1:4/s", "8/s"] and ramp.describe() == "rate 1:4, at most 16"


def test_presets(tmp_path):
    with pytest.raises(UsageError, match="needs the prompts of a ShareGPT file"):
        options("--preset", "paddlenlp")
    parser = verb_parser("bench serve")[0]
    args = apply_preset(
        parser.parse_all(["--preset", "paddlenlp", "--dataset", str(tmp_path / "s.json"), "--output-len", "100"])
    )
    found = read_options(args)
    (level,) = found.levels
    assert (level.concurrency, level.max_requests, args.warmup, found.endpoint) == (256, 3000, 256, "native")
    assert (args.temperature, args.top_p, found.dataset.outputs.low) == (0.6, 0.95, 100)
    (level,) = options("--preset", "vllm", "--concurrency", "4").levels
    assert level.rate is None and level.concurrency == 4 and level.max_requests == 1000, "the user's pace stands"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--endpoint grpc", "does not fit"),
        ("--endpoint chat --url grpc://h:1", "does not fit"),
        ("--requests 0", "--requests 0"),
        ("--warmup -1", "--warmup -1"),
        ("--timeout 0", "--timeout 0"),
        ("--duration nan", "--duration nan"),
        ("--concurrency 0", "--concurrency '0'"),
        ("--concurrency 1,x", "--concurrency 'x'"),
        ("--rate 1,2 --concurrency 1,2", "both have several levels"),
        ("--rate inf --duration 5", "--rate inf"),
        ("--arrivals constant", "belongs to --rate"),
        ("--dataset a.json --input-len 5", "--input-len belongs to random prompts"),
        ("--prefix-groups 2", "belong together"),
        ("--whole-conversations", "belongs to a dataset"),
        ("--think-time -1", "--think-time"),
        ("--input-len 0", "--input-len"),
        ("--extra-body x", "--extra-body is not JSON"),
        ("--extra-body [1]", "no JSON object"),
        ("--extra-body " + r'{"a":"\ud800"}', "--extra-body is not JSON that can be sent"),
        ("--extra-body " + '{"a":' + "[" * 100_000, "--extra-body is not JSON that can be sent"),
        ("--concurrency \xb2", "--concurrency '\xb2'"),
        ("--concurrency " + "9" * 5000, "--concurrency '999"),
        ("--rate 1e308:1e307", "--rate '1e308:1e307'"),
        ("--rate 1 --arrivals gamma:1e308", "--arrivals 'gamma:1e308'"),
        ("--header x", "is not NAME: VALUE"),
        ("--header \xc4:B", "is not NAME: VALUE"),
        ("--header a(b:B", "is not NAME: VALUE"),
        ("--header a!b:B --url grpc://h:1", "is not NAME: VALUE"),
        ("--header a:\xc4 --url grpc://h:1", "characters that HTTP cannot carry"),
        ("--header Content-Length:5", "the client writes itself"),
        ("--header host:h", "the client writes itself"),
        ("--api-key a\x0bb", "control character"),
        ("--api-key \N{SNOWMAN}", "characters that HTTP cannot carry"),
        ("--save /proc/x.json", "--save: '/proc/x.json' cannot be written"),
    ],
)
def test_options_that_are_refused(words, message):
    with pytest.raises(UsageError) as caught:
        options(*words.split(" "))
    assert message in caught.value.what and (caught.value.remedy or caught.value.there_is)


def test_keys_are_read_from_variables_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "open")
    assert options().headers == (("Authorization", "Bearer open"),)
    monkeypatch.setenv("INFERPLANE_API_KEY", "ours,other")
    assert options().headers == (("Authorization", "Bearer ours"),)
    found = options("--api-key", "mine", "--header", "X-Key: hidden")
    assert found.headers == (("Authorization", "Bearer mine"), ("X-Key", "hidden"))
    assert "mine" not in str(found.shown) and "hidden" not in str(found.shown)


def test_the_verb_needs_no_torch():
    code = (
        "import sys; from inferplane.cli.main import main; "
        "main(['bench', 'serve', '--url', 'http://127.0.0.1:9', '--requests', '1']); "
        "import inferplane.cli.verbs.bench.serve.report; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "error: http://127.0.0.1:9: the connection could not be made" in done.stderr, (
        done.stderr
    )
