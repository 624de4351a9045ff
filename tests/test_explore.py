"""docs/explore.html in a real browser: a script is added to a copy of the page, and what it says on
the console is read back."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_cer import finite_distribution

import evaluate
from cer import cer, exact_cer
from rloo import leave_one_out

PAGE = Path(__file__).parents[1] / "docs" / "explore.html"
FILM = re.compile('(?<=<script type="application/json" id="film">).*(?=</script>)')
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")

# What the tests' JavaScript uses. check() keeps what is not as expected.
CHECKS = """const failed = [], soon = (ms = 20) => new Promise(resolve => setTimeout(resolve, ms));
    const check = (what, found, expected = true) =>
      JSON.stringify(found) === JSON.stringify(expected) || failed.push([what, found, expected]);
    const near = (found, expected) => found.every((x, i) => Math.abs(x - expected[i]) < 2e-3);
    const set = (id, value) => { $(id).value = value; return $(id).oninput({ target: $(id) }); };
    const pressed = id => $(id).querySelector("[aria-pressed=true]")?.textContent;
    const style = getComputedStyle, first = id => $(id).firstChild.data, row = tr => [...tr.cells];
    const text = id => $(id).textContent, look = lines => openRun(new File([lines], "f"));
    const table = () => [...$("samples").rows].map(tr => row(tr).map(cell => cell.textContent));"""


def in_browser(folder, steps, film=None):
    """Run JavaScript at the end of the page, with this film -> what it returns."""
    probe = f"<script>(async () => {{ {CHECKS} {steps} return failed; }})()"
    probe += ".catch(e => String(e)).then(x => console.log('RESULT' + JSON.stringify(x) + 'END'));"
    page = FILM.sub(lambda _: json.dumps(film), PAGE.read_text())
    (folder / "page.html").write_text(page.replace("</body>", f"{probe}</script>"))
    command = f"timeout 60 {BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr"
    command = [*command.split(), f"--user-data-dir={folder}/browser", f"{folder}/page.html"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        said = (re.search("RESULT(.*)END", line) for line in browser.stderr)
        found = next(filter(None, said), None)
        browser.terminate()
    assert found, "the page said nothing within a minute"
    return json.loads(found[1])


def test_its_mathematics_is_ours(tmp_path):
    prior, likelihood = finite_distribution()
    log_W, log_P = torch.randn(5, 4).double() * 300, -torch.rand(4).double()
    log_W[0], log_W[1], log_W[2, :2] = log_W[0] / 300, -torch.inf, -torch.inf
    W = json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")
    steps = f"""const R = cer({W}, {log_P.tolist()}), prior = {prior.tolist()};
        return [exactCer(prior, {likelihood.tolist()}).rho, R, leaveOneOut(R)];"""
    R = cer(log_W, log_P)
    expected = exact_cer(prior, likelihood), R, leave_one_out(R)
    for found, ours in zip(in_browser(tmp_path, steps), expected, strict=True):
        torch.testing.assert_close(torch.tensor(found).double(), ours, rtol=0, atol=1e-6)


def test_play(tmp_path):
    """In each example Theorem 2 holds, also after a slider has moved. The mean R of the samples is
    near rho where M = N, and A is 0 with one shared solution. The chain from W to A is right in
    three digits. Pointing at a sample lights its rows and P, and shows the terms of its reward."""
    steps = """for (let k = 0; k < PRESETS.length; k++) {
          preset(k);
          const seen = [...$("spread").rows].slice(1).map(tr => row(tr).map(td => +td.textContent));
          check("samples of 100 groups", sum(seen.map(([, , , , samples]) => samples)), 800);
          for (const [, , rho, mean, samples] of seen)
            if (k < 5 && samples > 100) check(`mean R, ${k}`, Math.abs(mean - rho) < 0.02);
          for (const { slider } of controls.slice(0, 4)) {
            const [cer, exact] = JSON.parse($("theorem").dataset.sides);
            check("Theorem 2", Math.abs(cer - exact) < 1e-9);
            slider.value = .66; slider.oninput({target: slider}); check("drag", slider.isConnected);
          }
          for (const p of [state.prior, ...state.likelihood]) check("a sum", near([sum(p)], [1]));
        }
        check("advantages", JSON.parse($("drawn").dataset.advantages), Array(8).fill(0)); preset(0);
        const numbers = tr => row(tr).slice(1).map(td => +td.title || +td.textContent);
        const W = [...$("weights").rows], drawn = [...$("drawn").rows], P = numbers(drawn[1]);
        const chain = drawn.slice(2, -1).map(numbers), A = leaveOneOut(chain.map(tr => tr[8]));
        chain.forEach((found, i) => {
          const w = numbers(W[i + 2]), D = w.pop(), terms = P.map((p, j) => found[j] * p);
          check("W to A", near([...w.map(x => x / D), sum(terms), A[i], D], [...found, sum(w)]));
          drawn[i + 2].onpointerenter(); check("terms", near(terms, numbers(drawn.at(-1))));
          const lit = [...document.querySelectorAll(".picture .lit")].map(tr => tr.rowIndex);
          check("the rows", lit, [i + 2, 1, i + 2]);
        });"""
    assert in_browser(tmp_path, steps) == []


def test_play_asks_and_its_text_follows_the_numbers(tmp_path):
    steps = """const [, name, , question, answer] = PRESETS[0], {slider, typed, p} = controls[0];
        const R = () => $("drawn").querySelector("td.R"), tell = () => $("sentence").lastChild;
        const sees = (...expected) => check("the text",
          [first("sentence"), pressed("presets"), style(R()).visibility], expected);
        sees(question, name, "hidden"); tell().click(); sees(answer, name, "visible");
        check("as worked out", R().textContent, "0.466");
        for (const value of ["", "-1", "1e309", "0,5"]) {
          typed.value = value; typed.onchange({target: typed});
          check("what is no probability is ignored", [...p], [.5, .3, .2]);
        }
        for (const value of [1, .5]) { slider.value = value; slider.oninput({target: slider}); }
        check("the old proportions", near(p, [.5, .3, .2]));
        sees("These are your own numbers.", undefined, "visible");
        for (const N of [16, 4]) { set("N", N); check("M is N", +$("M").value, N); }"""
    assert in_browser(tmp_path, steps) == []


def group(step, reward, **more):
    """One line of train.py's samples.jsonl: four samples, of which the second is cut off."""
    line = {"step": step, "question": "Ana has\n\n3 bags.", "reference": "14", "R": reward}
    line |= {"answers": ["14", None, "18", "14"], "truncated": [False, True, False, False]}
    return line | {"texts": [r"So \boxed{14}", "I count the\neggs and", "18?", "14!"]} | more


MATRICES = {"distinct_answers": ["14", "18"], "columns": [0, 2, 3], "log_P": [-1.0, -5.0, -2.0]}
MATRICES |= {"log_W": [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]]}
LOG_W = torch.tensor([MATRICES["log_W"][0], [-torch.inf, -1.0, -torch.inf]])
R14, R18 = cer(LOG_W, torch.tensor(MATRICES["log_P"])).tolist()
R, SAID = [R14, 0.0, R18, R14], {"verdicts": ["right", None, "wrong", "right"]}


def as_file(lines):
    return json.dumps("".join(json.dumps(line) + "\n" for line in lines))


def test_look_reads_files(tmp_path):
    """Bad lines, small pieces, a file that has changed."""
    good = [group(1, [0.5] * 4), group(2, [1.0, 0.0, 0.0, 1.0]), group(2, [0.0] * 4)]
    steps = f"""const good = {as_file(good)}, line = good.split("\\n")[0];
        const empty = JSON.stringify({{...JSON.parse(line), answers: []}});
        for (const [lines, expected] of [[good, ": 3 groups in 2 steps."],
          ["", " is no samples.jsonl: it is empty."],
          ['{{"step": 1\\n' + good, ": 3 groups in 2 steps. 1 line left out (line 1: "],
          [empty, " is no samples.jsonl: line 1: it has no samples."]]) {{
          await look(lines); check(expected, text("say").startsWith("f" + expected));
        }}
        await openRun(new File([good], "f"), 1);  // in pieces of one byte, then larger ones
        await set("part", 1); check("from the middle", table()[1], ["1: = 14", "1.000", "+0.667"]);
        const no = () => Promise.reject("it has changed"), target = {{value: "f"}};
        opened.file = {{name: "f", size: 9, slice: () => ({{text: no, arrayBuffer: no}})}};
        await showGroup(); check("a change", text("question").includes("Choose it again"));
        $("file").onclick({{target}}); check("the same file can be chosen", target.value, "");"""
    assert in_browser(tmp_path, steps) == []


def test_look_at_a_run(tmp_path):
    """Every sample opens, the posterior does not underflow, and the text follows the group."""
    mixed = [(1 + R18) / 2, 0.0, R14 / 2, (1 + R18) / 2]  # Rule+CER, where CER prefers 18
    lines = [group(1, R, **MATRICES), group(2, [1.0, 0.0, 0.0, 1.0], **SAID), group(2, [0.0] * 4)]
    lines += [group(3, mixed, **SAID | MATRICES | {"distinct_answers": ["18", "14"]})]
    lines += [group(3, [None, 0.0, None, None], correct=[True, False, False, True])]
    A = [f"{a:+.3f}" for a in leave_one_out(torch.tensor(R))]
    high, low = f"{R14:.3f}", f"{R18:.3f}"
    rows = f"""sample|s1|s4|s3|R|A, P = π(a*|s,q)|0.368|0.135|0.007,
        1: = 14|0.67|0.24|0.09|{high}|{A[0]}, 4: = 14|0.67|0.24|0.09|{high}|{A[3]},
        3: 18|||1.00|{low}|{A[2]}, 2: (no answer)||||0.000|{A[1]}, terms|0.245|0.033|0.001|{high}"""
    # For each filter the steps that are left (from 0), the first of them, and its groups.
    filters = {"all": [2, 1, 1], "zero": [0, 2, 1], "ahead": [0, 3, 1], "wrong": [1, 2, 1]}
    filters |= {"truncated": [2, 1, 1], "unanswered": [2, 1, 1]}
    steps = f"""const panel = () => [text("whose"), text("solution")], found = {{}};
        await look({as_file(lines)});
        check("CER", table().map(tr => tr.join("|")), `{rows}`.split(/,\\s+/));
        $("samples").rows[5].querySelector("button").click();
        check("the last", panel(), ["Sample 2: (no answer) (truncated)", "I count the\\neggs and"]);
        await set("part", 1); check("the next", panel()[0], "Sample 1: = 14");
        await set("part", 2); check("Rule+CER", table()[0].slice(-4), ["CER", "R", "A", "verdict"]);
        check("its CER and R", table()[4].slice(-4, -2), ["{high}", "{R14 / 2:.3f}"]);
        await set("group", 2); check("no number", table()[1], ["1: = 14", "–", "–", "right"]);
        for (const {{value}} of $("filter").options) {{
          $("filter").value = value; await $("filter").onchange();
          found[value] = [$("part").max, text("partout"), text("groupsout")].map(Number);
        }}
        check("filters", found, {json.dumps(filters)});"""
    assert in_browser(tmp_path, steps) == []


def test_the_files_of_both_scripts_open(script, tmp_path, finished_run):
    """In an evaluation, the samples of a question are one group."""
    flags = f"--model {finished_run}/checkpoints/step-4 --dataset toy-test --limit 2 --runs 3"
    assert script(evaluate, f"{flags} --max-new-tokens 48 --out {tmp_path}/scores")[0] == 0
    files = [(f / "samples.jsonl").read_text() for f in (finished_run, tmp_path / "scores")]
    steps = f"""for (const file of {json.dumps(files)}) {{
          await look(file); failed.push(text("say").split(" in ")[1], table().length);
        }}"""
    assert in_browser(tmp_path, steps) == ["4 steps.", 3 + 4, "1 data set.", 1 + 3]


def test_the_film(tmp_path):
    """Without a film nothing is shown. With one, the slider chooses the frame of every run."""
    assert in_browser(tmp_path, "check('hidden', $('movie').hidden); onresize();") == []
    more = MATRICES | SAID | {"right": 0.5, "slip": 0.2, "samples": 8}
    frames = [group(0, R, **more, forms=[0.1, 0.3]), group(5, R, **more, forms=[0.1, 0.7])]
    film = {"watch": "Watch.", "question": "How many?", "reference": "14", "forms": ["14", "it is"]}
    film["runs"] = [{"name": name, "frames": frames} for name in ("seed 2", "seed 3")]
    steps = """check("shown", [$("movie").hidden, text("watch")], [false, "Watch."]);
        for (const [k, ...expected] of [[0, "wrong", "0", "0.30"], [1, "wrong", "5", "0.70"]]) {
          set("frame", k); check("the step", text("step"), expected[1]);
          for (const {table, forms, curves} of takes) {
            const cells = [table.rows[4].lastChild, forms.querySelector(".now"),
              forms.rows[2].cells[k + 1]].map(cell => cell.textContent);
            check("a frame", [...cells, curves.children.length], [...expected, 1]);
          }
        }"""
    assert in_browser(tmp_path, steps, film) == []


def test_learn_shows_what_its_claims_say(tmp_path):
    """pass@1 after 25 steps, and the probability of a slip after 50."""
    steps = """const pass = x => curves[x][25].pass.mean, slips = x => curves[x][50].slip.mean;
        const shows = async (k, what) => { await claim(k, 50); check(CLAIMS[k][1], what()); };
        await shows(0, () => Math.abs(pass("cer") - pass("perfect")) < .01);
        check("exact match is slower", pass("exact") < pass("cer") - .2);
        await shows(1, () => slips("cer1") > .2 && slips("cer") < .06);
        await shows(2, () => pass("verifree") > pass("cer") + .03);
        check("VeriFree's slips", slips("verifree") < slips("cer"));
        await shows(3, () => pass("exact") < pass("cer") && pass("cer") < pass("perfect") - .08);
        await shows(4, () => pass("exact") > pass("cer") + .05);"""
    assert in_browser(tmp_path, steps) == []


def test_learn_starts_in_sight_and_again_when_a_setting_changes(tmp_path):
    """The last settings win, and a claim's text goes when a setting changes."""
    steps = """const last = () => curves.exact.at(-1).pass.mean, top = $("look").offsetTop;
        for (let k = 0; learning === 1; k++) {  // twice if the first frame was not drawn yet
          scrollTo(0, k % 2 ? 0 : $("learn").offsetTop); await soon(100);
        }
        const old = learn(); $("learn-forms").value = 1; await Promise.all([learn(50), old]);
        check("one form: a perfect verifier", last(), curves.perfect.at(-1).pass.mean);
        check("nothing below the charts moves", $("look").offsetTop, top);
        location.hash = "#learn/slips";
        while (!$("charts").innerHTML.includes("stroke-dasharray: 9 6")) await soon();
        const says = (...expected) =>
          check("a claim", [$("learn-M").value, pressed("claims"), first("claim")], expected);
        says("16", CLAIMS[1][1], CLAIMS[1][4]);
        set("learn-N", 12); says("12", undefined, "These are your own settings.");"""
    assert in_browser(tmp_path, steps) == []
