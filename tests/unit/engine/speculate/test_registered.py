"""Methods of speculation that plugins bring: found, given their options, watched, and left out when they fail."""

import sys
import warnings

import pytest

from inferplane import plugins
from inferplane.engine.request.arguments import DRAFT_ALIASES, NETWORK_METHODS, NO_DRAFTS
from inferplane.engine.speculate import Proposer, SpeculativeConfig
from inferplane.errors import InferplaneWarning, PluginError, UsageError
from inferplane.plugins.host import PROPOSERS
from inferplane.plugins.registration import NOT_PROPOSERS
from inferplane.serving.configure import resolve
from tests.house.rules import IN_TREE
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, engine, right

MODULE = """
from inferplane.engine.speculate import Proposer
from inferplane.plugin import UsageError, hookimpl

INFERPLANE_API = (1, 1)

class Fixed(Proposer):
    '''Drafts one token again and again, or what `drafts` says.'''
    made = []

    def __init__(self, context, *, token: int = 3, share: float = 0.5, eager: bool = True, words: str = ''):
        if words == 'raise':
            raise ZeroDivisionError('no')
        if words == 'refuse':
            raise UsageError('words = refuse.')
        self.context, self.token, self.ended = context, token, []
        self.drafts = lambda most: [token] * most
        Fixed.made.append(self)

    def propose(self, chunks, max_drafts, hidden):
        return [self.drafts(most) for most in max_drafts]

    def forget(self, request):
        self.ended.append(request.request_id)

class Needing(Proposer):
    def __init__(self, context, file):
        self.file = file

@hookimpl
def inferplane_register_proposers(register):
    register('fixed', Fixed)
    register('needing', 'fake_drafts:Needing')
    register('anything', lambda context, **options: options)
    register('lost', 'fake_drafts:NotThere')
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    (tmp_path / "fake_drafts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    found = plugins.discover(f"{IN_TREE},fake_drafts")
    monkeypatch.setattr("inferplane.plugins.host", lambda: found)
    yield found
    import fake_drafts

    fake_drafts.Fixed.made.clear()
    monkeypatch.delitem(sys.modules, "fake_drafts")


def run(drafts=None, **config):
    """The engine and its requests after it has answered with the method `fixed`."""
    e = engine(400, spec={"method": "fixed", "num_speculative_tokens": 3, "adaptive": False, **config})
    if drafts is not None:
        e.speculator.proposer.inner.drafts = drafts
    each = [e.add(prompt, greedy(12)) for prompt in some(3, 5)]
    e.finish()
    assert all(map(right, each))
    return e, each


def test_a_plugins_method_drafts(host):
    e, each = run()
    proposer = e.speculator.proposer.inner
    assert e.stats()["spec_decode_num_draft_tokens_total"] > 0
    assert proposer.context.vocab == V and proposer.context.config.method == "fixed"
    assert sorted(proposer.ended) == sorted(r.request_id for r in each)


def test_options_reach_the_method_and_are_checked(host):
    config = SpeculativeConfig.of({"method": "fixed", "num_speculative_tokens": 2, "token": 5, "share": 1})
    assert config.options == {"token": 5, "share": 1} and config.num_speculative_tokens == 2
    assert config == SpeculativeConfig("fixed", 2, options={"token": 5, "share": 1})
    e, _ = run(options={"token": 1})
    assert e.speculator.proposer.inner.token == 1
    for options, words in (
        ({"tokens": 5}, "names 'tokens', which method 'fixed' does not have.*token, share, eager, words"),
        ({"token": 5.0}, "token = 5.0"),
        ({"share": "much"}, "share = 'much'"),
        ({"eager": 1}, "eager = 1"),
        ({"words": 3}, "words = 3"),
    ):
        with pytest.raises(UsageError, match=words):
            SpeculativeConfig.of({"method": "fixed", **options})
    with pytest.raises(UsageError, match="'needing' lacks 'file'"):
        SpeculativeConfig.of({"method": "needing"})
    assert SpeculativeConfig.of({"method": "anything", "odd": 1}).options == {"odd": 1}


def test_a_setting_of_the_server_may_name_it(host):
    assert resolve({"speculative_method": "fixed"}, {}).settings.speculative_method == "fixed"
    with pytest.raises(UsageError, match=r"guess.*eagle.*fixed"):
        resolve({"speculative_method": "guess"}, {})


def test_options_of_no_plugin_are_refused(host):
    for wrong in (
        {"method": "ngram", "token": 1},
        {"method": "ngram", "options": {"token": 1}},
        {"method": "mtp", "options": {"token": 1}},
        {"method": "fixed", "options": 3},
    ):
        with pytest.raises(UsageError, match=r"token|options"):
            SpeculativeConfig.of(wrong)
    with pytest.raises(UsageError, match="'fixed' with model"):
        SpeculativeConfig("fixed", model="demo-draft")


def test_unknown_methods_name_those_there_are(host):
    for make in (SpeculativeConfig, lambda name: SpeculativeConfig.of({"method": name, "token": 1})):
        with pytest.raises(UsageError, match="ngram, suffix, draft_model, mtp, eagle, anything, fixed, lost, needing"):
            make("magic")


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        (lambda most: [3] * (most + 1), "drafts for a sequence that may have"),
        (lambda most: [V], f"drafted {V}, which is no token: there are {V}"),
        (lambda most: [-1] * most, "drafted -1, which is no token"),
        (lambda most: [1.0] * most, "drafted 1.0, which is no token"),
        (lambda most: None, "returned a NoneType"),
        (lambda most: "12"[:most], "returned a str"),
    ],
)
def test_wrong_drafts_are_refused_and_named(host, drafts, words):
    """Their sequences go on, with the tokens that they would have had; `max_drafts` 0 is a maximum too."""
    with pytest.warns(InferplaneWarning, match=f"Drafting failed.*Proposer 'fixed' of fake_drafts.*{words}"):
        e, _ = run(drafts)
    assert e.stats()["spec_decode_failures_total"] > 0 and e.pools.used == 0


def test_a_list_for_each_sequence(host):
    e = engine(400, spec={"method": "fixed", "num_speculative_tokens": 3})
    e.speculator.proposer.inner.propose = lambda chunks, most, hidden: []
    asked = e.add(some(1, 5)[0], greedy(9))
    with pytest.warns(InferplaneWarning, match=r"returned 0 list.s. for 1 sequence"):
        e.finish()
    assert right(asked)


def test_a_request_ends_though_its_proposer_cannot_forget_it(host):
    def forget(request):
        raise KeyError(request.request_id)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        e = engine(400, spec={"method": "fixed"})
        e.speculator.proposer.inner.forget = forget
        each = [e.add(prompt, greedy(6)) for prompt in some(3, 5)]
        e.finish()
    assert all(map(right, each))
    assert ["cannot forget a request" in str(w.message) for w in caught] == [True]


def test_methods_that_fail_are_quarantined(host):
    for config, words in (
        ({"method": "fixed", "options": {"words": "raise"}}, "ZeroDivisionError"),
        ({"method": "anything"}, "it made a dict"),
    ):
        with pytest.raises(PluginError, match=words):
            engine(8, spec=config)
    with pytest.raises(PluginError, match="NotThere"):
        SpeculativeConfig("lost")
    assert [record.stage for record in host.list_quarantined()] == ["proposer"] * 3
    with pytest.raises(UsageError, match="words = refuse"):
        engine(8, spec={"method": "fixed", "options": {"words": "refuse"}})


def test_core_takes_the_same_path(host):
    assert set(PROPOSERS) <= set(host.proposers())
    for name in PROPOSERS:
        made = engine(8, spec={"method": name}).speculator.proposer
        assert isinstance(made, Proposer) and type(made).__module__.endswith(name), "and is not watched"


def test_names_that_have_a_meaning():
    assert {*NETWORK_METHODS, *DRAFT_ALIASES, *NO_DRAFTS} == {*NOT_PROPOSERS}


@pytest.mark.parametrize("needs", [True, False])
def test_whether_it_needs_a_step_is_what_the_plugin_says(host, monkeypatch, needs):
    import fake_drafts

    monkeypatch.setattr(fake_drafts.Fixed, "needs_step", lambda self, chunks, most: needs)
    e = engine(400, spec={"method": "fixed", "num_speculative_tokens": 3})
    assert e.speculator.proposer.needs_step([], []) == needs
