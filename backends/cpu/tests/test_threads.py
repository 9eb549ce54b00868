"""How many threads: physical cores, affinity, limits of control groups of both versions, and the environment."""

import subprocess
import sys

import pytest
import torch

from inferplane_cpu import threads
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.threads import Processors, best_thread_count, parse_processor_list, processors, thread_count

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 31 0:29 {shown} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
OTHER_V1 = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


@pytest.fixture
def machine(tmp_path):
    """Write files of a made-up machine; returns its root."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path

    return write


def topology(cores, siblings=2, nodes=1):
    """Processors i, i + cores, ... share core i; cores are dealt to nodes in equal runs."""
    files = {}
    for i in range(cores * siblings):
        same = range(i % cores, cores * siblings, cores)
        files[f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list"] = ",".join(map(str, same))
    each = cores // nodes
    for n in range(nodes):
        runs = [f"{s * cores + n * each}-{s * cores + (n + 1) * each - 1}" for s in range(siblings)]
        files[f"sys/devices/system/node/node{n}/cpulist"] = ",".join(runs)
    return files


def group(own, mount, **limits):
    return {"proc/self/cgroup": own, "proc/self/mountinfo": mount} | {
        f"sys/fs/cgroup/{name}": text for name, text in limits.items()
    }


def test_siblings_are_one_core(machine):
    root = machine(topology(8))
    found = processors(root, set(range(16)))
    assert (found.allowed, found.cores, found.quota, found.nodes) == (16, 8, None, 1)
    assert best_thread_count(found._replace(total=16)) == (8, "8 physical cores")
    assert processors(root, {0, 8, 1}).cores == 2
    assert best_thread_count(Processors(16, 3, 2)) == (
        2,
        "2 physical cores within this process's affinity, 3 of 16 processors",
    )


def test_nodes_are_told(machine):
    root = machine(topology(8, nodes=2))
    assert processors(root, set(range(16))).nodes == 2 and processors(root, {0, 1, 8}).nodes == 1
    assert best_thread_count(Processors(16, 16, 8, nodes=2)) == (8, "8 physical cores, over 2 NUMA nodes")


def test_a_machine_that_says_nothing(tmp_path):
    assert processors(tmp_path, {0, 1, 2})[1:] == (3, 3, None, 1)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (group("0::/", V2, **{"cpu.max": "250000 100000"}), 2.5),
        (group("0::/", V2, **{"cpu.max": "max 100000"}), None),
        (group("0::/a/b", V2, **{"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 50000"}), 3.0),
        (group("0::/a/b", V2, **{"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}), 2.0),
        (group("0::/../other", V2, **{"cpu.max": "100000 100000"}), 1.0),
        (
            group(
                "9:cpuset:/\n4:cpu,cpuacct:/docker/c0",
                f"{OTHER_V1}\n{V1.format(shown='/docker/c0')}",
                **{"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            ),
            4.0,
        ),
        (
            group(
                "4:cpu,cpuacct:/slice/job",
                V1.format(shown="/"),
                **{
                    "cpu,cpuacct/slice/job/cpu.cfs_quota_us": "-1",
                    "cpu,cpuacct/slice/job/cpu.cfs_period_us": "100000",
                    "cpu,cpuacct/slice/cpu.cfs_quota_us": "50000",
                    "cpu,cpuacct/slice/cpu.cfs_period_us": "100000",
                },
            ),
            0.5,
        ),
        (group("4:cpu,cpuacct:/", V1.format(shown="/"), **{"cpu,cpuacct/cpu.cfs_quota_us": "-1"}), None),
        (group("9:cpuset:/", OTHER_V1, **{"cpuset/cpu.cfs_quota_us": "100000"}), None),
        (group("0::/", V2, **{"cpu.max": "what"}), None),
    ],
    ids=["v2", "v2_max", "v2_parent", "v2_own", "v2_outside", "v1", "v1_parent", "v1_none", "v1_other", "nonsense"],
)
def test_limits_of_control_groups(files, quota, machine):
    assert processors(machine(files), {0, 1, 2, 3}).quota == quota


@pytest.mark.parametrize(
    ("quota", "count", "why"),
    [
        (2.5, 2, "a control group's limit of 2.5 processors; 8 physical cores"),
        (0.5, 1, "a control group's limit of 0.5 processors; 8 physical cores"),
        (64.0, 8, "8 physical cores"),
    ],
)
def test_a_limit_is_rounded_down(quota, count, why):
    assert best_thread_count(Processors(8, 8, 8, quota)) == (count, why)


def test_who_decides(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    p = Processors(8, 8, 4)
    assert str(thread_count({"OMP_NUM_THREADS": "6"}, p)) == "6 threads (OMP_NUM_THREADS=6)"
    assert str(thread_count({}, p)) == "4 threads (4 physical cores)"
    assert str(thread_count({}, Processors(16, 16, 16))) == "6 threads (as torch was set, of 16 physical cores)"
    assert str(thread_count({}, Processors(1, 1, 1))) == "1 thread (1 physical core)"


def test_ranges():
    assert (
        parse_processor_list("0-2,8") == {0, 1, 2, 8}
        and parse_processor_list("") == set()
        and parse_processor_list("5") == {5}
    )


def test_opening_settles_and_doctor_tells(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "processors", lambda: Processors(8, 8, 4, 2.0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert "2 threads (a control group's limit of 2 processors; 4 physical cores)" in CpuBackend.probe().reason
        assert torch.get_num_threads() == 3, "looking changes nothing"
        CpuBackend().open()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_environment_decides_in_a_new_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = "from inferplane_cpu.backend import CpuBackend; CpuBackend().open(); print(CpuBackend.probe().reason)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "1 thread (OMP_NUM_THREADS=1)" in out
