"""docs/explore.html in a real browser: a script is added to a copy of the page, and what it says on
the console is read back."""

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from conftest import FAST
from test_cer import finite_distribution

import train
from cer import cer, exact_cer

PAGE = Path(__file__).parents[1] / "docs" / "explore.html"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")


def in_browser(folder, steps):
    """Runs JavaScript at the end of the page -> what it returned, by way of the console."""
    probe = "<script>(async () => { %s })().catch(e => ({error: String(e)}))"
    probe += ".then(result => console.log('RESULT' + JSON.stringify(result) + 'END'));</script>"
    (folder / "page.html").write_text(PAGE.read_text().replace("</body>", probe % steps))
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr".split()
    command = [BROWSER, *flags, f"--user-data-dir={folder}/browser", f"file://{folder}/page.html"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        timer = threading.Timer(60, browser.kill)
        timer.start()
        found = next(
            (m for line in browser.stderr if (m := re.search("RESULT(.*)END", line))), None
        )
        timer.cancel()
        browser.kill()
    return json.loads(found[1])


def test_its_mathematics_is_ours(tmp_path):
    prior, likelihood = finite_distribution()
    log_W = torch.randn(5, 4, dtype=torch.float64) * 300
    log_W[1] = -torch.inf
    log_W[2, :2] = -torch.inf
    log_P = -torch.rand(4, dtype=torch.float64)
    W = json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")
    steps = f"return {{rho: exactCer({prior.tolist()}, {likelihood.tolist()}).rho, "
    found = in_browser(tmp_path, f"{steps} R: cer({W}, {log_P.tolist()})}};")
    assert torch.allclose(torch.tensor(found["R"], dtype=torch.float64), cer(log_W, log_P), 0, 1e-9)
    rho = torch.tensor(found["rho"], dtype=torch.float64)
    assert torch.allclose(rho, exact_cer(prior, likelihood), rtol=0, atol=1e-9)


def test_play(tmp_path):
    """Theorem 2 in every example, also after a bar has moved; one shared solution teaches nothing;
    no request leaves the page."""
    found = in_browser(
        tmp_path,
        """const sides = [], sums = [];
        const look = () => sides.push(JSON.parse($("theorem").dataset.sides));
        for (let k = 0; k < PRESETS.length; k++) {
          preset(k); look();
          for (const input of [...$("inputs").querySelectorAll("input[type=range]")].slice(0, 4)) {
            input.value = 0.66; input.oninput({target: input}); look();
            if (!input.isConnected) throw Error("a bar that is dragged must stay");
          }
          sums.push(sum(state.prior), ...state.likelihood.map(sum));
        }
        const shared = JSON.parse($("drawn").dataset.advantages);
        return {sides, sums, shared, requests: performance.getEntriesByType("resource").length};""",
    )
    assert len(found["sides"]) == 6 * 5
    assert all(abs(cer - exact) < 1e-12 for cer, exact in found["sides"])
    assert all(abs(total - 1) < 1e-9 for total in found["sums"])
    assert len(found["shared"]) == 8 and not any(found["shared"]) and found["requests"] == 0


def test_look(script, tmp_path, toy_model_dir):
    code, _, err = script(train, f"--model {toy_model_dir} --out run {FAST}")
    assert code == 0, err
    good = (tmp_path / "run" / "samples.jsonl").read_text()
    files = {"samples.jsonl": good, "broken.jsonl": '{"step": 1\n' + good, "wrong.txt": "a b c"}
    found = in_browser(
        tmp_path,
        f"""const files = {json.dumps(files)}, seen = {{}};
        for (const [name, text] of Object.entries(files)) {{
          await openRun(new File([text], name));
          seen[name] = [$("say").textContent, $("run").hidden, +$("step").max];
        }}
        await openRun(new File([files["samples.jsonl"]], "samples.jsonl"));
        const first = $("question").textContent;
        $("step").value = 1; await showStep();
        $("matrix").querySelector("button").onclick();
        const cells = [...$("matrix").rows].map(r => [...r.cells].map(c => c.textContent));
        const numbers = {{first, last: $("question").textContent, step: $("stepout").textContent}};
        return {{seen, ...numbers, cells, solution: $("solution").textContent}};""",
    )
    assert found["seen"]["samples.jsonl"] == ["samples.jsonl: 4 groups in 2 steps.", False, 1]
    assert found["seen"]["broken.jsonl"][0].startswith("broken.jsonl: 4 groups in 2 steps. line 1 ")
    assert found["seen"]["wrong.txt"][0].startswith(
        "wrong.txt is no samples.jsonl of a run: line 1"
    )
    assert found["seen"]["wrong.txt"][1]
    groups = [json.loads(line) for line in good.splitlines()]
    assert found["first"].startswith(groups[0]["question"]) and found["step"] == "2"
    assert found["last"].startswith(groups[2]["question"])
    assert found["solution"] in groups[2]["texts"]
    best = max(groups[2]["R"])
    assert float(found["cells"][2][-1]) == pytest.approx(best, abs=1e-3)
