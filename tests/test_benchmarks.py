"""The benchmarks run end to end, also in bf16, and write what they print."""

import re

import compare_rewards
import pytest
import scoring
import step
from test_scripts import script  # noqa: F401  a fixture

SMALL_STEP = "--shape tiny --questions 2 --samples 4 --distinct 3 --mean-tokens 16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring(script, tmp_path, dtype):  # noqa: F811
    flags = f"--shape tiny --samples 4 --answers 3 --context 64 --dtype {dtype} --out table.md"
    code, out, err = script(scoring, flags)
    assert code == 0, err
    assert (tmp_path / "table.md").read_text() == out
    worst = max(float(x) for x in re.findall(r"(\S+e[-+]\d\d) \|$", out, re.MULTILINE))
    assert worst < (1e-4 if dtype == "float32" else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step(script, dtype):  # noqa: F811
    code, out, err = script(step, f"{SMALL_STEP} --dtype {dtype} --rows 4 --kv-tokens 200")
    assert code == 0, err
    for name in ["as train.py does", "one call a batch", "4 rows", "`cer`", "`nover`", "update"]:
        assert f"| {name} |" in out


def test_the_table_of_rewards():
    lines = [
        {
            "name": "cer", "seed": seed, "commit": "abc", "pass@1 start": "0.3",
            "pass@1 middle": "", "pass@1 end": end, "mean reward at the end": "0.1",
            "zero-advantage groups": "0.02", "sample seconds": "1", "reward seconds": "2",
            "update seconds": "3",
        }
        for seed, end in ((0, "0.8"), (1, "0.9"))
    ]  # fmt: skip
    table = compare_rewards.table(lines, ["cer", "exact"])
    assert "| `cer` | 0.30 (0.30 to 0.30) | - | 0.85 (0.80 to 0.90) | 0.10 | 2% |" in table
    assert "exact" not in table and "commit abc" in table
