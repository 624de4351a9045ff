"""The benchmarks run end to end, in their smallest shape."""

import json
import shutil

import compare_rewards
import film
import gpu
import judge
import pandas
import pytest
import torch


def test_speed(script):
    code, out, err = script(gpu, "--shape tiny --repeats 1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["part"] for line in lines} == {"scoring", "decoding", "sampling", "updating"}
    assert max(line.get("largest_difference", 0) for line in lines) < 1e-4
    assert all(line["seconds"] > 0 and line["commit"] and line["torch"] for line in lines)


def test_differences_are_paired_by_seed():
    """.3 and .2 for the two seeds that both have; Student's t for one degree of freedom."""
    ends = [("cer", 0, 0.8), ("cer", 1, 0.9), ("cer", 2, 0.1), ("exact", 1, 0.7), ("exact", 0, 0.5)]
    lines = pandas.DataFrame(ends, columns=["name", "seed", "pass@1 end"])
    table = compare_rewards.by_seed(lines, "pass@1 end")
    assert "| `exact` | 0.500 | 0.700 |  | +0.250 (-0.385 to +0.885) |" in table


@pytest.mark.parametrize("real", [False, True])
def test_a_comparison_resumes(script, tmp_path, monkeypatch, toy_model_dir, real):
    """A run of two steps; started again nothing is run again. A real model is warm-started."""
    monkeypatch.setattr(compare_rewards, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(compare_rewards.toy.warm_start, "__defaults__", (30,))
    monkeypatch.setattr(compare_rewards.warm_start, "__defaults__", (3,))
    flags = f"--rewards cer --seeds 0 --steps 2 --out {tmp_path}/table.csv"
    flags += f" --model {toy_model_dir}" if real else ""
    for _ in range(2):
        code, out, err = script(compare_rewards, flags)
        assert code == 0, err
    [checkpoints] = tmp_path.glob("runs/*-cer-0/checkpoints")  # as if killed before the first one
    shutil.rmtree(checkpoints)
    (tmp_path / "table.csv").unlink()
    code, out, err = script(compare_rewards, flags)
    assert code == 0, err
    lines = pandas.read_csv(tmp_path / "table.csv")
    assert lines.name.tolist() == ["cer"] and lines.lr.tolist() == [[6e-4, 1e-5][real]]
    assert (tmp_path / "table.png").exists()
    [line] = compare_rewards.read(tmp_path / "table.csv")
    line |= {"pass@1 start": 0.1, "pass@1 end": 0.8, "commit": "abc"}
    both = pandas.DataFrame([line, line | {"seed": 1, "pass@1 end": 0.9}])
    table = compare_rewards.table(both)
    assert "| `cer` | 0.10 (0.10 to 0.10) |" in table and "0.85 (0.80 to 0.90)" in table
    assert "Seeds [0, 1], commit abc" in table


def test_how_well_rewards_tell_right_from_wrong(script, tmp_path, monkeypatch, toy_model_dir):
    """Two seeds of twenty questions; a seed that is run again replaces its lines."""
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    flags = f"--model {toy_model_dir} --name toy --questions 20 --samples 4 --out {tmp_path}/j.csv"
    for seed in 0, 1, 1:
        code, out, err = script(judge, f"{flags} --seed {seed}")
        assert code == 0, err
    assert "| `cer` |" in out and "`rule+cer`" in out and (tmp_path / "j.png").exists()
    table = pandas.read_csv(tmp_path / "j.csv")
    lines = table.set_index(["seed", "statistic", "which"])["mean"].sort_index()
    assert not lines.index.duplicated().any()
    groups = pandas.read_json(tmp_path / "runs/judge/toy-1/samples.jsonl", lines=True)
    assert len(groups) == 20
    received = groups.R.map(sum).sum() / 80
    assert lines[1, "mean reward", "cer"] == pytest.approx(received, abs=1e-4)
    assert lines[1, "share of answers"].sum() == pytest.approx(1, abs=0.1)


def test_statistics_of_one_question_by_hand():
    """Two right samples, a slip after right work, and one without an answer."""
    question = "Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?"
    group = dict(question=question, reference="14")
    group |= dict(answers=["14", "14 eggs", "18", None])
    group |= dict(texts=["3*4=12; 12+2=14", "3*4=12; 12+2", "3*4=12; 12+2=14", "3+4=7; 7+2=9"])
    group |= dict(correct=[True, True, False, False])
    group |= dict(columns=[0, 1, 2], distinct_answers=["14", "14 eggs", "18"])
    log_W = torch.tensor([[0.5, 0.2, 0.3], [0.4, 0.3, 0.1], [0.1, 0.1, 0.8]]).log()
    group |= dict(log_W=log_W.tolist(), log_P=torch.tensor([0.5, 0.2, 0.3]).log().tolist())
    group |= dict(R=[0.38, 0.3625, 0.31, 0.0])  # D^-1 W P of these
    found = judge.statistics(group)
    assert found["AUC", "exact"] == 0.75 and found["AUC", "rule"] == 1.0
    assert found["AUC", "verifree"] == 0.75  # of .5 and .2 against .3 and 0
    assert found["a wrong one ahead", "verifree"] == 0.25
    assert found["a wrong one ahead", "exact"] == 0  # its errors are ties
    assert found["mean reward", "rule+cer"] == pytest.approx((2 + 0.38 + 0.3625 + 0.31) / 8)
    assert found["P after right work", "{n}"] == pytest.approx(1 / 3)
    assert found["slips among the wrong", "samples"] == 0.5
    assert found["posterior on right work, slips", "samples"] == pytest.approx(1)  # all are planned
    assert found["AUC, slips", "verifree"] == 0.5 and found["AUC, wrong work", "verifree"] == 1.0
    assert found["share of answers", "{n} {unit}"] == 0.25


def test_a_film_shows_the_samples_it_is_made_of(script, tmp_path, monkeypatch, toy_model_dir):
    """Two steps of one run. A step that the file has is not sampled again."""
    page = tmp_path / "page.html"
    page.write_text("before\n<!-- the film -->\nold\n<!-- end of the film -->\nafter\n")
    monkeypatch.setattr(film, "PAGE", page)
    (tmp_path / "step-5").symlink_to(toy_model_dir)
    sampling = "--out kept/cer.jsonl --questions 2 --models step-5"
    for models in "", f" {toy_model_dir}":
        code, _, err = script(film, f"{sampling}{models}")
        assert code == 0, err
    code, _, err = script(film, "--embed kept/cer.jsonl kept/cer.jsonl --question 1 --watch It.")
    assert code == 0, err

    first, marker, element, *rest = page.read_text().splitlines()
    assert [first, *rest] == ["before", "<!-- end of the film -->", "after"] and "film" in marker
    shown = json.loads(element.split(">", 1)[1].removesuffix("</script>"))
    groups = [json.loads(line) for line in (tmp_path / "kept/cer.jsonl").open()]
    assert [group["step"] for group in groups] == [5, 5, 0, 0]
    assert shown["question"] == groups[1]["question"] and len(shown["runs"]) == 2
    assert shown["reference"] in shown["forms"] and len(shown["forms"]) == 8
    for frame, of_step in zip(shown["runs"][1]["frames"], (groups[2:], groups[:2])):
        for name in "step", "texts", "answers", "distinct_answers", "columns":
            assert frame[name] == of_step[1][name]
        for name in "R", "log_P", "log_W":
            torch.testing.assert_close(
                torch.tensor(frame[name]), torch.tensor(of_step[1][name]), rtol=0, atol=6e-4
            )
        right = sum(of_step[0]["correct"] + of_step[1]["correct"]) / 32
        assert frame["right"] == pytest.approx(right, abs=1e-3)
        assert frame["verdicts"].count("right") == sum(of_step[1]["correct"])
