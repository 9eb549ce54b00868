"""Benchmarks without a model: lengths, workloads, figures from traces, and the reports that are made of them."""

from __future__ import annotations

import json
import random
import re
import statistics as standard
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from inferplane.cli.main import verb_parser
from inferplane.cli.screen import Screen, plural
from inferplane.cli.verbs.bench import check, measurements, plots, report, startup, statistics, workload
from inferplane.cli.verbs.bench.job_runner import JobTiming, StepTiming, Trace, run_jobs
from inferplane.cli.verbs.bench.length_distribution import Lengths, parse_lengths
from inferplane.engine import SamplingParams
from inferplane.errors import CapacityError, DeviceError, GenerationError, UsageError
from inferplane.files import write_atomically
from tests.unit.support import fake_model
from tests.unit.types.test_schemas import check as check_schema

GREEDY = SamplingParams(temperature=0)


# ---------------------------------------------------------------- lengths and workloads


def test_lengths_are_what_the_words_say():
    source = random.Random(1)
    many = {words: [parse_lengths(words).draw(source) for _ in range(20_000)] for words in ("7", "16-64", "exp:64:512")}
    assert set(many["7"]) == {7}
    assert set(many["16-64"]) == set(range(16, 65)) and standard.mean(many["16-64"]) == pytest.approx(40, rel=0.02)
    cut = many["exp:64:512"]
    assert min(cut) == 1 and max(cut) == 512 and standard.mean(cut) == pytest.approx(64.5, rel=0.04)
    assert standard.median(cut) == pytest.approx(64 * 0.6931 + 0.5, rel=0.05), "exponential, not merely of that mean"
    assert max(parse_lengths("exp:64").draw(source) for _ in range(20_000)) > 512
    assert [str(parse_lengths(words)) for words in (*many, "exp:2.5")] == [*many, "exp:2.5"]


@pytest.mark.parametrize("words", ["0", "5-3", "0-3", "-4", "exp:0", "exp:", "exp:5:0", "1.5", "normal:3", ""])
def test_lengths_that_mean_nothing(words):
    with pytest.raises(UsageError, match=r"^'.*' is no length"):
        parse_lengths(words)


def test_a_length_that_means_nothing_names_its_option():
    for flag in ("--input-len", "--output-len"):
        with pytest.raises(UsageError, match=f"^{flag} 'abc' is no length in tokens"):
            check(parsed("latency", flag, "abc"))


@pytest.mark.parametrize("flag", ["--save", "--html"])
def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(flag, tmp_path):
    with pytest.raises(UsageError, match=rf"^{flag}: '/proc/x\.json' cannot be written: No such file") as caught:
        check(parsed("latency", flag, "/proc/x.json"))
    assert caught.value.remedy
    kept = tmp_path / "old.json"
    kept.write_text("old")
    check(parsed("latency", flag, str(kept)))
    check(parsed("latency", flag, str(tmp_path / "new.json")))
    check(parsed("latency", flag, "/dev/null"))
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"] and kept.read_text() == "old"


def test_what_a_process_that_starts_a_model_was_refused_keeps_its_parts():
    said = {"kind": "DeviceError", "what": "Device 'x' is absent.", "there_is": "y", "remedy": "install x"}
    error = startup._parse_error("noise\n" + json.dumps({"error": said}) + "\n")
    assert type(error) is DeviceError
    assert (error.what, error.there_is, error.remedy) == (said["what"], "y", "install x")
    assert all(startup._parse_error(x) is None for x in ("", "noise", "[]", '{"error": {"kind": "Path"}}', "5"))


def test_one_repeat_is_no_repeats():
    assert (plural(1, "repeat"), plural(2, "repeat")) == ("1 repeat", "2 repeats")


def test_synthetic_jobs_repeat_with_their_seed():
    args = (50, parse_lengths("3-9"), parse_lengths("exp:5:20"), [4, 5, 6])
    jobs = workload.random_jobs(*args, seed=3)
    assert jobs == workload.random_jobs(*args, seed=3) != workload.random_jobs(*args, seed=4)
    assert {token for job in jobs for token in job.prompt} == {4, 5, 6}
    assert {len(job.prompt) for job in jobs} == set(range(3, 10)) and max(job.output_tokens for job in jobs) <= 20


def test_arrivals_are_a_poisson_process():
    jobs = [workload.BenchJob([1], 1)] * 20_001
    assert {job.due_s for job in workload.with_arrivals(jobs, None, 0)} == {0.0}
    due = [job.due_s for job in workload.with_arrivals(jobs, 8.0, 0)]
    gaps = [b - a for a, b in pairwise(due)]
    assert due[0] == 0 and standard.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert standard.stdev(gaps) == pytest.approx(1 / 8, rel=0.03), "as an exponential distribution's"


def dataset(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def encode(text):
    return [ord(letter) for letter in text]


def test_datasets(tmp_path):
    path = dataset(tmp_path, "a.jsonl", '{"prompt": "ab", "output_len": 3}\n\n{"prompt": [7, 8], "id": 1}\n')
    fixed = Lengths("fixed", 5, 5)
    assert workload.read_jobs(path, None, fixed, encode, 0) == [
        workload.BenchJob([97, 98], 3),
        workload.BenchJob([7, 8], 5),
    ]
    assert len(workload.read_jobs(path, 1, fixed, encode, 0)) == 1
    path = dataset(tmp_path, "a.txt", 'x\n{"prompt": 1}\n')
    assert [len(job.prompt) for job in workload.read_jobs(path, None, fixed, encode, 0)] == [1, 13]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "{}", '{"prompt": 5}', '{"prompt": ["a"]}', '{"prompt": [true]}', '{"prompt": ""}']
    + [f'{{"prompt": "a", "output_len": {n}}}' for n in ("0", "-1", "true", '"3"', "1.5", "null")],
)
def test_datasets_that_are_none(tmp_path, text):
    path = dataset(tmp_path, "a.jsonl", text)
    with pytest.raises(UsageError):
        workload.read_jobs(path, None, Lengths("fixed", 5, 5), encode, 0)


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        workload.read_jobs(tmp_path / "none.txt", None, Lengths("fixed", 5, 5), encode, 0)


# ---------------------------------------------------------------- running


def engine_of(**options):
    return fake_model.engine(enable_prefix_caching=False, **options)


def jobs_of(*outputs, due=0.0):
    return [workload.BenchJob([1 + i, 2, 3], n, i * due) for i, n in enumerate(outputs)]


def test_both_ways_give_every_job_its_tokens():
    engine, ended = engine_of(max_num_seqs=3), []
    jobs = jobs_of(4, 30, 2, 9, 1, 17, 5)
    joined = run_jobs(engine, jobs, GREEDY, lambda: ended.append(1))
    batches = run_jobs(engine, jobs, GREEDY, lambda: ended.append(1), batch=3)
    assert len(ended) == 14 and joined.ids == batches.ids
    for trace in (joined, batches):
        assert [s.output_tokens for s in trace.sequences] == [4, 30, 2, 9, 1, 17, 5]
        assert sum(step.tokens for step in trace.steps) == 68 and max(step.batch for step in trace.steps) == 3
        assert trace.steps[-1].used_blocks == 0 and not engine.busy
    assert len(batches.steps) == 30 + 17 + 5, "each batch waits for its longest member"
    assert len(joined.steps) < 45
    engine.pools.check()


def test_nobody_runs_before_it_arrives():
    trace = run_jobs(engine_of(), jobs_of(3, 3, 3, due=0.03), GREEDY, lambda: None)
    assert [s.due_s for s in trace.sequences] == [0.0, 0.03, 0.06]
    assert all(s.ttft_s > 0 and s.e2e_s >= s.ttft_s for s in trace.sequences) and trace.duration_s > 0.06


def test_a_job_that_cannot_run_stops_all_before_they_begin():
    engine = engine_of(blocks=8)
    with pytest.raises(CapacityError):
        run_jobs(engine, jobs_of(2, 500), GREEDY, lambda: None)
    assert engine.stats().get("steps_total", 0) == 0 and not engine.busy


def test_a_failing_job_is_no_measurement():
    def fail(request):
        raise RuntimeError("broken kernel")

    engine = engine_of()
    engine.fail_for = fail
    with pytest.raises(GenerationError, match="broken kernel"):
        run_jobs(engine, jobs_of(4, 4), GREEDY, lambda: None)
    assert not engine.busy and engine.pools.used == 0


# ---------------------------------------------------------------- figures


def test_percentiles_lie_between_neighbours():
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert [statistics.percentile(values, p) for p in (0, 25, 50, 90, 100)] == [1, 2, 4, pytest.approx(12.8), 16]
    assert statistics.percentile([3.0], 99) == 3
    draw = random.Random(0)
    many = sorted(draw.random() for _ in range(101))
    cuts = standard.quantiles(many, n=100, method="inclusive")
    for p in (50, 90, 95, 99):
        assert statistics.percentile(many, p) == pytest.approx(cuts[p - 1])
    found = statistics.summary([3.0, 1.0, 2.0])
    assert found["mean"] == 2 and (found["min"], found["p50"], found["max"], found["count"]) == (1, 2, 3, 3)
    assert statistics.summary([]) is None


def trace(*sequences, total_blocks=9):
    steps = [StepTiming(0.5 * (i + 1), 0.4, 2, i % 5, 3) for i in range(8)]
    return Trace([JobTiming(p, due, list(arrivals)) for p, due, arrivals in sequences], steps, total_blocks)


ONE = trace((10, 0.0, [(1.0, 1), (1.5, 1), (2.5, 3)]), (30, 0.5, [(2.0, 1)]), (5, 1.0, [(2.0, 2), (4.0, 1)]))


def test_metrics_by_hand():
    found = statistics.latencies([ONE])
    assert found["ttft"] == [1.0, 1.5, 1.0] and found["e2e"] == [2.5, 1.5, 3.0]
    assert found["itl"] == [0.5, 1.0, 2.0], "a step that brings three tokens is one arrival"
    assert found["tpot"] == [pytest.approx(1.5 / 4), 2.0], "what the first step brought is not counted"
    rates = {name: value for name, (value, _) in statistics.rates(ONE).items()}
    assert rates == {
        "requests": 3 / 4,
        "output_tokens": 9 / 4,
        "total_tokens": 54 / 4,
        "prefill_tokens": 45 / 2,
        "duration": 4.0,
    }
    slow = trace((10, 0.0, [(18.0, 9)]))
    assert statistics.ratio([ONE, ONE], [slow, ONE])["values"] == [pytest.approx(4.5), 1.0]


def test_speculation_counts_what_was_drafted_meanwhile():
    keys = ("spec_decode_num_draft_tokens_per_pos", "spec_decode_num_accepted_tokens_per_pos")
    before = {keys[0]: [5], keys[1]: [4], "spec_decode_num_drafts_total": 5}
    after = {keys[0]: [15, 8], keys[1]: [12, 2], "spec_decode_num_drafts_total": 15}
    found = statistics.speculation(before, after)
    assert (found["drafted"], found["accepted"], found["acceptance"]) == ([10, 8], [8, 2], [0.8, 0.25])
    assert found["tokens_per_verification"] == 2.0
    assert statistics.speculation({}, {}) is None is statistics.speculation(after, after)


# ---------------------------------------------------------------- reports

NASTY = "<script>alert('x')</script>&\"'"
WHERE = {
    "date": "2026-11-20T10:00:00Z",
    "model": NASTY,
    "device": "made",
    "device_name": NASTY,
    "arch": NASTY,
    "dtype": "float32",
    "plan": "0123456789abcdef",
    "kv_blocks": 9,
    "block_tokens": 16,
    "threads": 1,
    "machine": NASTY,
    "versions": {"inferplane": "0", "torch": NASTY, "python": "3"},
}


def measurement(kind="throughput", **changes):
    words = {"model": NASTY, "device": "made", "input_len": "3", "output_len": "exp:5", "seed": 0, "warmup": 1}
    drafts = {"drafted": [10, 8], "accepted": [8, 2], "acceptance": [0.8, 0.25], "tokens_per_verification": 2.0}
    made = {
        "options": {**words, "repeats": 2, "dataset": NASTY},
        "latencies": {name: statistics.summary(v) for name, v in statistics.latencies([ONE]).items()},
        "rates": statistics.over_repeats([ONE], ["requests", "output_tokens"]),
        "traces": [ONE],
        "compared": [ONE],
        "ratio": statistics.ratio([ONE], [ONE]),
        "speculation": drafts,
    }
    return measurements.Measurement(kind, WHERE, **{**made, **changes})


def start():
    phases = {"import": statistics.spread([1.0, 2.0], "s")}
    nothing = {"latencies": {}, "traces": [], "compared": [], "ratio": None, "speculation": None}
    return measurement("startup", rates=phases, **nothing)


@pytest.mark.parametrize("made", [measurement(), measurement(compared=[], ratio=None, speculation=None), start()])
def test_json_has_the_promised_form(made):
    facts = report.data(made)
    check_schema("bench", facts)
    for name in facts:
        with pytest.raises(Exception, match=name):
            check_schema("bench", {key: value for key, value in facts.items() if key != name})


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains of tags that are not closed."""

    VOID = ("meta", "line", "rect", "polyline")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], set(), [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in self.VOID or tag in ("rect",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("made", [measurement(), start()])
def test_a_page_stands_alone_and_escapes_all(made):
    text = report.page(made, report.data(made))
    found = Page(text)
    assert "script" not in found.tags and "link" not in found.tags and "img" not in found.tags
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "href", "srcset", "style"} and not any(name.startswith("on") for name in names)
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("http-equiv", "")
    assert "".join(found.text).count(NASTY) >= 4, "shown as it is"
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text


def test_plots_are_whole_drawings():
    text = report.page(measurement(), report.data(measurement()))
    drawings = re.findall(r"<svg.*?</svg>", text)
    assert len(drawings) == 6, "three distributions, three over time"
    for drawing in drawings:
        tree = xml.fromstring(drawing)
        for part in tree.iter():
            for name in ("x", "y", "x1", "y1", "width", "height"):
                if name in part.attrib and part.tag != "svg":
                    assert -1 <= float(part.attrib[name]) <= plots.WIDTH
    assert all("polyline" in drawing and "static" in drawing for drawing in drawings[3:])


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1.0, 1.0 + 1e-15], [0.0, 1e9], [1e-9, 2e-9]])
def test_histograms_hold_every_value(values):
    tree = xml.fromstring(plots.histogram(values, "t", "ms", [("p50", values[0])]))
    counts = [int(part.text.split()[0]) for part in tree.iter() if part.tag == "title"]
    assert sum(counts) == len(values)


def test_ticks_are_round_and_inside():
    for low, high in ((0, 1), (0, 7), (3.3, 3.4), (0, 123456), (0, 2e-6), (5, 5)):
        found = plots.ticks(low, high)
        assert found and all(low - 1e-9 <= t <= high + 1e-9 for t in found) and len(found) <= 12


def test_long_lines_are_thinned_to_means():
    line = plots.PlotLine("a", list(range(1000)), [float(i % 2) for i in range(1000)])
    some = plots.thin_line(line)
    assert len(some.x) <= plots.MAX_POINTS and some.x[-1] == 999 and standard.mean(some.y) == pytest.approx(0.5, 0.01)


def test_files_are_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "before")
    with pytest.raises(UsageError, match=r"cannot be written.*surrogates"):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(tmp_path / "none" / "a.json", "x")
    report.write(measurement(), tmp_path / "m.json", tmp_path / "m.html", Screen(json=True))
    assert json.loads((tmp_path / "m.json").read_text())["schema"] == 1
    assert (tmp_path / "m.html").read_text().startswith("<!doctype html>")


# ---------------------------------------------------------------- words


def parsed(*words):
    return verb_parser("bench")[0].parse_all(list(words))


@pytest.mark.parametrize(
    "words",
    [
        ("latency", "--rate", "3"),
        ("latency", "--compare", "static"),
        ("startup", "--dataset", "x"),
        ("throughput", "--rate", "0"),
        ("throughput", "--rate", "nan"),
        ("throughput", "--rate", "2", "--compare", "static"),
        ("throughput", "--repeats", "0"),
        ("throughput", "--warmup", "-1"),
        ("latency", "--max-batch", "0"),
        ("latency", "--input-len", "3-5"),
        ("latency", "--output-len", "x"),
        ("latency", "--speculate-max-draft-token-num", "2"),
        ("latency", "--save", "/none/such/a.json"),
        ("latency", "--html", "/"),
    ],
)
def test_words_that_make_no_sense(words):
    with pytest.raises(UsageError):
        check(parsed(*words))


def test_what_is_left_out_depends_on_the_kind():
    for kind, batch, repeats in (("latency", 1, 5), ("throughput", 16, 3), ("startup", 1, 3)):
        args = parsed(kind)
        check(args)
        assert (args.max_num_seqs, args.repeats, args.model) == (batch, repeats, "demo")
    assert measurements.engine_options(
        parsed("latency", "m", "--speculate-method", "ngram", "--speculate-max-draft-token-num", "3")
    )["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
    }
    given = measurements.engine_options(parsed("latency", "--quantization", "weight_only_int8", "--index", "2"))
    assert (given["quantization"], given["index"]) == ("weight_only_int8", 2)
