"""What core and backends may do with objects, bound methods and ops; each rule is proved on planted faults."""

from __future__ import annotations

import pytest

from inferplane.ops import OPS
from tests.house import abstraction, hidden_tables, op_names
from tests.house.rules import BACKEND_PACKAGES, CORE_PACKAGE, SHIPPED, none, plant

OP_NAMES = frozenset(OPS)

MAY_SET: dict[str, str] = {
    "binding/link.py: *": "makes the views",
    "binding/case.py: settings.fill_uninitialized_memory": "a setting of torch",
    "models/reading/checkpoint.py: held.owner": "a buffer of C holds its tensor",
    "kernels/packing.py: *.memory": "an array of C structures holds the tensors that it points to",
    "inferplane_cpu/native.py: function.*": "a function of ctypes",
    "inferplane_cpu/huge_pages.py: function.argtypes": "a function of ctypes",
    "request/text.py: self._inner.model_max_length": "the tokenizer of transformers",
    "gguf/tokenizer*.py: built.*": "parts of a tokenizer of tokenizers",
    "warnings.showwarning": "the standard library's hook",
    "logger.*": "a logger of the standard library",
    "serving/logs.py: record.facts": "a log record, as logging's `extra` sets it",
    "cli/*: parser.*": "a parser of argparse",
    "cli/*: args.*": "a namespace of argparse",
    "cli/arguments.py: action.aliases": "an action of argparse",
    "cli/arguments.py: shown.option_strings": "a copy of an action of argparse",
    "grpc/servicer.py: *": "messages of protobuf",
    "grpc/schema.py: *": "descriptors of protobuf",
    "serving/http/*: app.*": "an application of Starlette",
    "lifecycle/run.py: server.should_exit": "a server of uvicorn",
    "conformance/*: *session.*": "a session of pytest",
    "cli/arguments.py: setattr(args, *": "a namespace of argparse, in an action of it",
    "cli/error_wording.py: error.args": "an exception's arguments",
    "clients/llm.py: LLM.__init__.__signature__": "what `help` shows of options that are declared elsewhere",
    "request/params.py: SamplingParams.__init__": "a class that its module completes",
    "request/params.py: setattr(SamplingParams, *": "old names, until 0.3",
    "clients/client.py: Health.ready": "an old name, until 0.3",
    "request/tokenizer_loading.py: plain.*": "a tokenizer of transformers",
    "ops/mla.py: MLABlock.variants": "a class that its module completes, with functions that need it",
    "renamed.py: *cls*": "decorates classes",
}
"""`end of path: target` -> why this may be set."""


@pytest.mark.parametrize(
    "fault",
    [
        "def f(m):\n    return m.__self__\n",
        "def f(m):\n    return getattr(m, '__func__', None)\n",
        "import operator\n\nview_of = operator.attrgetter('step.__self__')\n",
        "import types\n\ndef f(m, view):\n    return types.MethodType(m, view)\n",
        "from types import MethodType\n",
        "import inspect\n\ndef f(m):\n    return inspect.ismethod(m)\n",
    ],
)
def test_looking_behind_methods_is_found(fault, tmp_path):
    assert len(abstraction.looks_behind_methods(plant(tmp_path, fault))) == 1


def test_nothing_looks_behind_bound_methods():
    none(abstraction.looks_behind_methods(*SHIPPED))


SHARED = """
class Scratch: ...
class Batch(Scratch):
    kv: LayerKV
    tokens: int = 0
class LayerKV:
    entries: list
class Request:
    drafts: list
    batch: Batch
    def __init__(self):
        self.computed = 0
class Chunk:
    request: Request
"""


@pytest.mark.parametrize(
    "fault",
    [
        "def f(y: torch.Tensor):\n    y.secret = 1\n",
        "def f(y):\n    y.secret = 1\n",
        "def f(y):\n    y.secret += 1\n",
        "def f(y):\n    y.secret: int = 1\n",
        "def f(y):\n    del y.secret\n",
        "def f():\n    y = torch.empty(3)\n    y.secret = 1\n",
        "def f(y):\n    y.data = 1\n",
        "def f(y):\n    y.drafts = 1\n",
        "def f(batch: Batch):\n    batch.tokens = 1\n",
        "def f(batch: Batch):\n    batch.kv.secret = 1\n",
        "def f(batch: Batch):\n    batch.kv.entries = 1\n",
        "def f(out):\n    out[0].secret = 1\n",
        "def f(out: list[Batch]):\n    out[0].tokens = 1\n",
        "def f(out):\n    out().secret = 1\n",
        "def f(out):\n    for out.secret in range(3): ...\n",
        "def f(out):\n    with open('x') as out.secret: ...\n",
        "def f(out):\n    a, (b, out.secret) = 1, (2, 3)\n",
        "def f(out):\n    a, *out.secret = 1, 2\n",
        "def f(out):\n    a = out.secret = 1\n",
        "def f(out):\n    return [0 for out.secret in range(3)]\n",
        "def f(outs):\n    for out in outs:\n        out.secret = 1\n",
        "def f(request: Request):\n    request.secret = 1\n",
        "def f(chunk: Chunk):\n    chunk.request.batch.tokens = 1\n",
        "def f(step):\n    setattr(step, 'secret', 1)\n",
        "def f(step):\n    delattr(step, 'secret')\n",
        "def f(step):\n    object.__setattr__(step, 'secret', 1)\n",
        "def f(step):\n    torch.Tensor.__setattr__(step, 'secret', 1)\n",
        "def f(step):\n    step.__setattr__('secret', 1)\n",
        "def f(step):\n    hang = setattr\n    hang(step, 'secret', 1)\n",
        "def f(step):\n    map(partial(setattr, step), names)\n",
        "def f(step):\n    any(setattr(step, name, 1) for name in 'ab')\n",
        "f = lambda step: setattr(step, 'secret', 1)\n",
        "def f(y):\n    y.__dict__['secret'] = 1\n",
        "def f(y):\n    y.__dict__.setdefault('secret', 1)\n",
        "def f(y):\n    y.__dict__.update(secret=1)\n",
        "def f(y):\n    y.__dict__ |= {'secret': 1}\n",
        "def f(y):\n    vars(y)['secret'] = 1\n",
        "def f(y):\n    vars(y).update(secret=1)\n",
        "def f(y):\n    held = vars(y)\n    held['secret'] = 1\n",
        "def f(y):\n    getattr(y, '__dict__')['secret'] = 1\n",
        "def f(y):\n    dict.update(y.__dict__, secret=1)\n",
        "class A:\n    def f(self):\n        self.batch.secret = 1\n",
        "class A:\n    def f(self):\n        self.batch.tokens = 1\n",
        "class A:\n    def f(self, y):\n        y.secret = 1\n",
        "class A:\n    @staticmethod\n    def f(y):\n        y.secret = 1\n",
        "class A:\n    def f(self):\n        object.__setattr__(self.batch, 'tokens', 1)\n",
        "def f(self):\n    self.secret = 1\n",
        "def f():\n    made = Request()\n    made.secret = 1\n",
        "def f(logits):\n    def inner():\n        logits.secret = 1\n    inner()\n",
        "class Mine(torch.Tensor):\n    def f(self):\n        self.secret = 1\n",
        "class Mine(Tensor):\n    def f(self):\n        setattr(self, 'secret', 1)\n",
        "class A(nn.Parameter): ...\nclass Mine(A):\n    def f(self):\n        self.secret = 1\n",
        "class Mine(torch.Tensor):\n    secret: int\ndef f(y: Mine):\n    y.secret = 1\n",
        "def f(x):\n    y = x or Request()\n    y.drafts = 1\n",
        "def f(x):\n    y = Request() if x is None else x\n    y.drafts = 1\n",
        "def f(x, y: Request):\n    z = y and x\n    z.drafts = 1\n",
        "def f(y=None):\n    if y is None:\n        y = Request()\n    y.drafts = 1\n",
        "def f(y):\n    y = y or Request()\n    y.drafts = 1\n",
        "def f(x):\n    y = Request()\n    if x:\n        y = torch.empty(3)\n    y.drafts = 1\n",
        "def f(y: Batch | None):\n    if y is None:\n        y = Batch()\n    y.tokens = 1\n",
        "def f(y: Request | torch.Tensor):\n    y.drafts = 1\n",
        "def f(y: torch.Tensor | None | Request):\n    y.drafts = 1\n",
        "def f(y: Union[Request, torch.Tensor]):\n    y.drafts = 1\n",
    ],
)
def test_attributes_on_others_are_found(fault, tmp_path):
    plant(tmp_path, SHARED, "types.py")
    assert len(abstraction.attributes_on_others(plant(tmp_path, fault))) == 1


@pytest.mark.parametrize(
    "fine",
    [
        "class A:\n    def f(self):\n        self.x, self.y = 1, 2\n        setattr(self, 'z', 3)\n",
        "class A:\n    def f(self):\n        object.__setattr__(self, 'x', 1)\n        self.__dict__.update(y=2)\n",
        "class A:\n    @classmethod\n    def f(cls):\n        cls.x = 1\n",
        "class A:\n    def f(self):\n        def inner():\n            self.x = 1\n        inner()\n",
        "def f(request: Request | None):\n    request.drafts, request.computed = [], 0\n",
        "def f(requests: list[Request]):\n    for r in requests:\n        r.computed += 1\n",
        "def f(chunks: list[Chunk]):\n    for c in chunks:\n        c.request.drafts = []\n",
        "def make() -> Request: ...\ndef f():\n    request = make()\n    request.drafts = []\n",
        "def f():\n    batch = Batch()\n    batch.tokens = 1\n",
        "def f(x: Request, y: Request | None):\n    z = y or x\n    z.drafts, (y or Request()).drafts = [], []\n",
        "def f(y: Request | None = None):\n    if y is None:\n        y = Request()\n    y.drafts = []\n",
        "def f():\n    y = None\n    y = Request()\n    y.drafts = []\n",
        "def f(y: Optional[Request]):\n    y.drafts = []\n",
        "def f(y):\n    return list(vars(y)), y.__dict__.items(), y.__dict__['read']\n",
        "def f():\n    def g(): ...\n    g.__name__ = 'h'\n    return g\n",
    ],
)
def test_attributes_of_ones_own(fine, tmp_path):
    plant(tmp_path, SHARED, "types.py")
    none(abstraction.attributes_on_others(plant(tmp_path, fine)))


def test_attributes_may_be_allowed_with_a_reason(tmp_path):
    plant(tmp_path, "def f(parser):\n    parser.usage = ''\n")
    none(abstraction.attributes_on_others(tmp_path, allowed={"fault.py: parser.*": "argparse's"}))
    assert abstraction.attributes_on_others(tmp_path / "none", allowed={"old": "why"}) == [
        "old: allowed, and no longer there"
    ]


def test_no_attribute_is_set_on_others():
    assert all(MAY_SET.values())
    none(abstraction.attributes_on_others(*SHIPPED, allowed=MAY_SET))


MAY_FILL: dict[str, str] = {
    "kernels/triton/quantized_results.py: _quantized": "decision 0032: a loss of an entry costs a launch, no meaning",
    "providers/flashinfer.py: _workspaces": "memory that the library overwrites in each call, one per device",
    "hopper/mla_launch.py: cls._made": "one workspace per device; what a step leaves in it no later one reads",
    "inferplane_cpu/huge_pages.py: _mover": "a queue to a thread that moves memory and changes no value",
    "models/registry.py: ARCHITECTURES": "the registry of models",
    "models/registry.py: SPELLINGS": "the registry of how families' configs are written",
    "ops/op.py: OPS": "the registry of ops",
    "ops/op.py: EXTENSIONS": "the registry of what ops got later",
    "types/kv_request.py: KV_KINDS": "the registry of kinds of cache",
    "dialogue/render.py: sys": "the search path of a process of its own",
    "sampling/grammar_check.py: sys": "the search path of a process of its own",
    "http/check_process.py: sys": "the search path of a process of its own",
    "process/child.py: _started": "the child processes of this one, to kill at its end; they carry no results",
}
"""`end of path: table` -> why functions may fill it."""


@pytest.mark.parametrize(
    "fault",
    [
        "_M = {}\ndef f(x):\n    _M[id(x)] = 1\n",
        "_M = {}\ndef f(x):\n    _M[x] = 1\n",
        "_M: dict = {}\ndef f(x):\n    key = x.data_ptr()\n    _M[key] = 1\n",
        "_M = WeakTensorKeyDictionary()\ndef f(x):\n    _M[x] = 1\n",
        "_M = weakref.WeakKeyDictionary()\ndef f(x):\n    _M.setdefault(x, []).append(1)\n",
        "_M = weakref.WeakKeyDictionary()\ndef f(x):\n    _M.update({x: 1})\n",
        "_M = {}\ndef f(x):\n    _M.__setitem__(id(x), 1)\n",
        "_M = {}\ndef f(x):\n    held = _M\n    held[id(x)] = 1\n",
        "_M = defaultdict(dict)\ndef f(x):\n    _M[id(x)]['norm'] = 1\n",
        "_M = defaultdict(list)\ndef f(x):\n    _M.get(id(x)).append(1)\n",
        "_M = []\ndef f(x):\n    _M.append((x, 1))\n",
        "if True:\n    _M = {}\ndef f(x):\n    def inner():\n        _M[id(x)] = 1\n",
        "_M = {}\nclass A:\n    def f(self, x):\n        _M[x] = 1\n",
        "class A:\n    M = {}\n    def f(self, x):\n        M[x] = 1\n",
        "class A:\n    M = {}\n    def f(self, x):\n        A.M[id(x)] = 1\n",
        "class A:\n    M = {}\n    def f(self, x):\n        self.M[id(x)] = 1\n",
        "from tables import M\ndef f(x):\n    M[id(x)] = 1\n",
        "import tables\ndef f(x):\n    tables.M[id(x)] = 1\n",
        "import tables\ndef f(x):\n    tables.M.update({x: 1})\n",
        "_M = None\ndef f(x):\n    global _M\n    _M = {}\n    _M[x] = 1\n",
        "_M = {}\nf = lambda x: _M.update({id(x): 1})\n",
    ],
)
def test_hidden_tables_are_found(fault, tmp_path):
    assert len(hidden_tables.hidden_tables(plant(tmp_path, fault))) == 1


@pytest.mark.parametrize(
    "fine",
    [
        "_M = {}\ndef f(x):\n    return _M[x], _M.get(id(x))\n",
        "_M = {}\ndef f(x):\n    _M = {}\n    _M[x] = 1\n    return _M\n",
        "_M = {}\n_M['a'] = 1\nM = {**_M}\n",
        "M = {}\ndef f(M):\n    M['a'] = 1\n",
        "import torch\ndef f(x):\n    torch.add(x, 1)\n    torch.cat([x]).add(1)\n",
        "class A:\n    rows: dict\n    def __init__(self):\n        self.rows = {}\n        self.rows['a'] = 1\n",
    ],
)
def test_tables_that_hide_nothing(fine, tmp_path):
    none(hidden_tables.hidden_tables(plant(tmp_path, fine)))


def test_no_table_of_a_module_carries_results(tmp_path):
    assert all(MAY_FILL.values())
    none(hidden_tables.hidden_tables(*SHIPPED, allowed=MAY_FILL))
    assert hidden_tables.hidden_tables(tmp_path, allowed={"old": "why"}) == ["old: allowed, and no longer there"]


@pytest.mark.parametrize(
    "fault",
    [
        "def f(batch):\n    batch._scratch['x'] = 1\n",
        "def f(batch):\n    return batch._scratch.get('x')\n",
        "def f(batch):\n    return getattr(batch, '_scratch')\n",
        "def f(batch):\n    batch.__dict__.setdefault('_scratch', {})\n",
        "class A(Scratch):\n    def f(self):\n        self._scratch = {}\n",
    ],
)
def test_scratch_is_touched_by_once_only(fault, tmp_path):
    assert len(hidden_tables.touches_scratch(plant(tmp_path, fault))) == 1
    none(hidden_tables.touches_scratch(*SHIPPED))


@pytest.mark.parametrize(
    "fault",
    [
        "def f(op):\n    return op.name == 'rms_norm'\n",
        "def f(op):\n    return op.name in ('rms_norm', 'x')\n",
        "def f(op):\n    return op.name not in {'rms_norm': 1}\n",
        "def f(op):\n    match op.name:\n        case 'rms_norm':\n            return 1\n",
        "def f(kernel):\n    match kernel.op:\n        case 'x' | 'mla_block':\n            return 1\n",
        "NAMES = frozenset({'rms_norm', 'linear'})\ndef f(op):\n    return op.name in NAMES\n",
        "NAMES: tuple[str, ...] = ('rms_norm',)\ndef f(plan):\n    return plan.op.name in NAMES\n",
        "NORM = 'rms_norm'\ndef f(kernel):\n    return kernel.op == NORM\n",
        "def f(op):\n    return op.name.startswith('mla')\n",
        "def f(kernel):\n    return kernel.op.endswith('_write')\n",
        "def f(op):\n    return 'mla' in op.name\n",
        "import re\ndef f(op):\n    return re.match('mla_.*', op.name)\n",
        "def f(op):\n    return {'rms_norm': 1}[op.name]\n",
        "def f(op):\n    return {'rms_norm': 1}.get(op.name)\n",
        "TABLE = {'rms_norm': 1}\ndef f(op):\n    return TABLE[op.name]\n",
        "TABLE = {'rms_norm': 1}\ndef f(op):\n    return TABLE.get(op.name, 0)\n",
        "def f(op):\n    return type(op).__name__ == 'RMSNorm'\n",
        "def f(op):\n    return op.__class__.__name__ in ('RMSNorm', 'MLABlock')\n",
        "def f(op):\n    return type(op).__name__.startswith('MLA')\n",
        "def f(op):\n    name = op.name\n    return name == 'rms_norm'\n",
        "def f(op):\n    return (name := op.name) == 'rms_norm'\n",
        "def f(op):\n    return op.name[:3] == 'mla'\n",
        "def f(op):\n    return op.name.lower() in ['x']\n",
        "def f(op):\n    return getattr(op, 'name') == 'x'\n",
        "def f(op):\n    return op.name.__eq__('rms_norm')\n",
        "import operator\n\ndef f(op):\n    return operator.eq(op.name, 'rms_norm')\n",
        "import fnmatch\n\ndef f(op):\n    return fnmatch.fnmatch(op.name, 'mla_*')\n",
        "def f(op):\n    return type(op) is OPS['rms_norm']\n",
        "def f(op):\n    names = ('rms_norm', 'x')\n    return op.name in names\n",
        "def f(op):\n    table = {'rms_norm': 1}\n    return table[op.name]\n",
        "def f(op):\n    names: set = {'linear'}\n    return op.name in names\n",
        "class A:\n    NAMES = ('linear',)\n    def f(self, op):\n        return op.name in self.NAMES\n",
        "class A:\n    TABLE = {'linear': 1}\n    def f(self, op):\n        return self.TABLE[op.name]\n",
        "class A:\n    TABLE = {'linear': 1}\n    def f(self, op):\n        return A.TABLE.get(op.name)\n",
        "def f(op, names=('linear',)):\n    return op.name in names\n",
        "def f(op, *, table={'linear': 1}):\n    return table[op.name]\n",
        "def f(a, op, b=1, names=('linear',)):\n    return op.name not in names\n",
        "def f(op):\n    return op.name.count('norm')\n",
        "def f(op):\n    return op.name.rfind('norm') >= 0\n",
        "def f(op):\n    return op.name.__contains__('norm')\n",
        "def f(op):\n    return ('linear', 'x').__contains__(op.name)\n",
        "def f(op):\n    return ('linear', 'x').count(op.name)\n",
        "def f(op):\n    return {'linear'}.issuperset({op.name})\n",
        "NAMES = {'linear'}\ndef f(op):\n    return NAMES.isdisjoint([op.name])\n",
        "NAMES = {'linear'}\ndef f(op):\n    return {op.name}.issubset(NAMES)\n",
        "NAMES = {'linear'}\ndef f(op):\n    return {op.name} & NAMES\n",
        "def f(op):\n    return getattr(op, f'_x_{op.name}')()\n",
        "def f(op):\n    return getattr(handlers, op.name)\n",
        "def f(kernel):\n    return hasattr(handlers, 'on_' + kernel.op)\n",
        "def f(op):\n    return globals()[op.name]\n",
        "def f(op):\n    return vars(handlers)['on_' + op.name]\n",
        "def f(x):\n    return x.name.startswith('mla_')\n",
        "def f(o):\n    return 'norm' in o.name\n",
        "def f(step):\n    return step.name == 'linear'\n",
        "def f(entry):\n    return entry['op'].startswith('mla')\n",
        "def f(entry):\n    return entry['op'] in ('linear', 'x')\n",
        "def f(entry):\n    what = entry['op']\n    return what == 'linear'\n",
        "def f(entry):\n    return entry.get('op') == 'linear'\n",
        "def f(kernel):\n    return kernel.name.endswith(':linear')\n",
        "def f(kernel):\n    return ':linear' in kernel.name\n",
        "def f(op):\n    return type(op).__qualname__ == 'Linear'\n",
        "def f(op):\n    return op.__class__.__qualname__ == 'Linear'\n",
    ],
)
def test_decisions_by_names_of_ops_are_found(fault, tmp_path):
    assert len(op_names.compares_op_names(plant(tmp_path, fault), names=OP_NAMES)) == 1


@pytest.mark.parametrize(
    "fine",
    [
        "def f(op):\n    return f'{op.name} has no kernel', getattr(op, 'name')\n",
        "def f(op, table):\n    return table[op.name], table.get(op.name), OPS[op.name]\n",
        "def f(field):\n    return field.name == 'drafts', field.name.startswith('_')\n",
        "def f(op, other):\n    return op.name == other.name, {op.name} & other.names\n",
    ],
)
def test_names_of_ops_may_be_shown_and_looked_up(fine, tmp_path):
    none(op_names.compares_op_names(plant(tmp_path, fine), names=OP_NAMES))


def test_names_of_ops_from_another_module_are_found(tmp_path):
    plant(tmp_path, "NAMES = ('rms_norm',)\n", "names.py")
    plant(tmp_path, "import names\n\ndef f(op):\n    return op.name in names.NAMES\n")
    assert len(op_names.compares_op_names(tmp_path, names=OP_NAMES)) == 1


def test_nothing_in_core_and_backends_decides_by_names_of_ops():
    folders = [path for path in CORE_PACKAGE.iterdir() if path.is_dir() and path.name != "ops"]
    folders += BACKEND_PACKAGES
    none(op_names.compares_op_names(*folders, names=OP_NAMES, allowed=("plugins/old_kernels.py",)))
