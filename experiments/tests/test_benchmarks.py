"""benchmarks/: the scripts run in their smallest shape."""

import functools
import json

import pytest

from benchmarks import gpu


def test_speed(script, monkeypatch):
    few = {"scoring": {"N": 2}, "sampling": {"rows": 8}, "flagship": {"rows": 8, "prompt": 16}}
    for part, sizes in few.items():
        monkeypatch.setitem(gpu.PARTS, part, functools.partial(gpu.PARTS[part], **sizes))
    code, out, err = script(gpu, "--shape tiny --repeats 1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["part"] for line in lines} == {*gpu.PARTS}
    assert max(line.get("largest_difference", 0) for line in lines) < 1e-4
    assert all(line["seconds"] > 0 and line["commit"] and line["torch"] for line in lines)


def test_a_step_beside_ours(script, toy_model_dir):
    pytest.importorskip("trl")
    from benchmarks import against_trl

    flags = "--dataset toy --questions 2 --samples 2 --steps 2 --max-new-tokens 8 --rewards cer"
    code, out, err = script(against_trl, f"--model {toy_model_dir} {flags}")
    assert code == 0, err
    [row] = [line for line in out.splitlines() if line.startswith("| cer")]
    theirs, ours, ratio = (float(cell.split()[0]) for cell in row.split("|")[3:6])
    assert theirs / ours == pytest.approx(ratio, rel=0.02)
