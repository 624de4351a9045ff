"""docs/explore.html and docs/samples.html in a real browser: a script is added to a copy of the
page, and what it says on the console is read back."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_cer import finite_distribution

from cer import cer, exact_cer
from experiments.two_tables.two_tables_figure import judge, train, two_tables
from rloo import leave_one_out

DOCS = Path(__file__).parents[2] / "docs"
TROLL = DOCS.parent / "experiments" / "people" / "troll" / "samples.jsonl"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")

# What the tests' JavaScript uses. It returns what it found.
TOOLS = """const found = [], drawn = (ms = 50) => new Promise(done => setTimeout(done, ms));
    const check = (what, is, expected = true) => {
      if (`${is}` !== `${expected}`) throw Error(`${what}: ${is}, not ${expected}`);
    };
    const go = async name => {
      location.hash = `step-${name}`;
      do await drawn(); while (state.step !== name);
    };
    const text = id => document.getElementById(id).textContent;
    const section = name => document.querySelector(`[data-step=${name}]`);
    const guess = (name, k) => section(name).querySelectorAll(".guess button")[k].click();
    const move = (id, to) => { $(id).value = to; $(id).dispatchEvent(new Event("input")); };
    const open = (...lines) => openRun(new File(lines, "f"));"""


def in_browser(folder, steps, page="explore.html"):
    """Run JavaScript at the end of the page -> what it returns. No error may come before that."""
    probe = f"<script>(async () => {{ {TOOLS} {steps} return found; }})()"
    probe += ".then(x => `RESULT${JSON.stringify(x)}END`, String).then(console.log);"
    source = (DOCS / page).read_text() if page else "<body></html>"
    (folder / "page.html").write_text(source.replace("</html>", f"{probe}</script>"))
    command = f"timeout 120 {BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr"
    command += " --force-prefers-reduced-motion --window-size=1300,1200"
    command += f" --user-data-dir={folder} {folder}/page.html"
    with subprocess.Popen(command.split(), stderr=subprocess.PIPE, text=True) as browser:
        said = next((line for line in browser.stderr if "CONSOLE" in line), "nothing")
        browser.terminate()
    assert (found := re.search("RESULT(.*)END", said)), f"the page said {said}"
    return json.loads(found[1])


def short(x, digits=3):
    return f"{x:.{digits}f}".replace("0.", ".", 1).replace("-", "−")


def same(found, ours):
    torch.testing.assert_close(torch.tensor(found).to(ours), ours, rtol=0, atol=1e-6)


def check_group(g, likelihood, M=8):
    """The rewards of a group that the darts hit are cer.py's, and so are the chosen columns."""
    P, W = likelihood[g["s"], 0], likelihood[g["s"]][:, g["a"]].T
    kept = torch.tensor([[w is not None for w in row] for row in g["W"]])
    own = torch.tensor(g["a"])[:, None] == torch.tensor(g["a"])
    assert (kept.sum(1) == M).all()
    assert ((kept & own).sum(1) == own.sum(1).clamp(max=M)).all()
    R = cer(W.log().masked_fill(~kept, -torch.inf), P.log())
    same([g["R"], g["A"]], torch.stack([R, leave_one_out(R)]))


def test_its_mathematics_is_ours(tmp_path):
    """On ten random models exactCer, and cer and the advantages of groups that the darts hit. cer
    also where W underflows, where solutions are masked, and where all of them are."""
    models = [finite_distribution(S=3, A=4, seed=seed) for seed in range(10)]
    log_W, log_P = torch.randn(5, 4).double() * 300 - 2000, -torch.rand(4).double()
    log_W[1], log_W[2, :2] = -torch.inf, -torch.inf
    steps = f"""const models = {json.dumps([[p.tolist(), L.tolist()] for p, L in models])};
        const W = {json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")};
        return [cer(W, {log_P.tolist()}), models.map(([prior, likelihood], k) =>
          [exactCer(prior, likelihood).rho,
            [8, 4, 1].map(M => judge({{ prior, likelihood }}, throwDarts(k), M))])];"""
    found, of_models = in_browser(tmp_path, steps)
    same(found, cer(log_W, log_P))
    for (prior, likelihood), (rho, groups) in zip(models, of_models, strict=True):
        same(rho, exact_cer(prior, likelihood))
        for g, M in zip(groups, (8, 4, 1), strict=True):
            check_group(g, likelihood, M)


def replay(reward, setting, run):
    """The run's darts, once more in Python: the policy before each step, what they hit, R, A, the
    push, and so Adam's or SGD's steps."""
    F, junk = setting["F"], setting.get("junk", 0)
    theta, phi = (table.detach().double() for table in two_tables(1, F, setting["slip"]))
    if junk:  # one answer more, with this probability in every column
        phi = (phi.softmax(-1) * (1 - junk)).log()
        phi = torch.cat([phi, torch.full((1, 6, 1), junk).log()], -1)
    theta, phi = theta.requires_grad_(), phi.requires_grad_()
    optimizer = getattr(torch.optim, setting["optimizer"])([theta, phi], lr=setting["rate"])
    for seen in run:
        pi_s, pi_a = theta[0].softmax(-1), phi[0].softmax(-1)
        same(seen["pi"][0], pi_s.detach())
        same(seen["pi"][1:], pi_a.detach())
        of_answers = (pi_s @ pi_a).detach()
        shares = [of_answers[:F].sum(), of_answers[6 * F :].sum()]
        same([seen["right"], seen["junk"]], torch.stack(shares))
        u, v = torch.tensor(seen["darts"], dtype=torch.double).T.contiguous()
        s = torch.searchsorted(pi_s.cumsum(0), u[:, None], right=True)[:, 0]
        a = torch.searchsorted(pi_a[s].cumsum(1), v[:, None], right=True)[:, 0]
        assert seen["s"] == s.tolist() and seen["a"] == a.tolist()
        star = torch.tensor([[seen["star"]]])
        paid = torch.tensor([0.83 if x == 6 * F else 0.7 if x < F else 0.28 for x in a.tolist()])
        known = "CER" if reward == "asking" else reward
        R, losses = judge(known, theta, phi, s[None, None], a[None, None], star, M=8)
        R = (paid if reward == "asking" else R[0, 0]).double()  # Adam would see float32's rounding
        log_pi = theta[0].log_softmax(-1)[s] + phi[0].log_softmax(-1)[s, a]
        loss = losses[0, 0] if reward == "VeriFree" else -(leave_one_out(R) * log_pi).mean()
        same([seen["R"], seen["A"]], torch.stack([R, leave_one_out(R)]))
        optimizer.zero_grad()
        loss.backward()
        same(seen["gradient"][0], -theta.grad[0])
        optimizer.step()


def test_the_learning_squares_are_ours(tmp_path):
    """All their numbers, at 60 steps of each of their runs. And what the mean of 20 runs shows."""
    steps = """for (const name of ["same", "race", "verifree", "ask"]) {
          const step = STEPS[name], setting = step.setting();
          for (const reward of step.rewards) found.push([reward, setting,
            runOf(reward, step).slice(0, 60).map(each => ({ ...each,
              gradient: each.gradient.map(x => [...x]), pi: each.pi.map(x => [...x]) }))]);
        }
        const F = 4, [one] = runOf("CER", STEPS.verifree);
        found.push([one.pi.map(x => [...x]), one.star,
          [0, one.star, 4, 9].map(a => levelOf("CER", one, F, 2, [a, a + 1]))]);
        await go("race"); guess("race", 0);
        for (const [adam, forms] of [[true, 2], [true, 4], [false, 2], [true, 0]]) {
          draw({ adam, forms });
          found.push(section("race").textContent.match(/\\d+ steps/g).slice(-2).map(parseFloat));
        }"""
    *squares, levels, four, sixteen, sgd, one_form = in_browser(tmp_path, steps)
    for reward, setting, run in squares:
        replay(reward, setting, run)
    (prior, *rows), star, shares = levels
    rho = exact_cer(torch.tensor(prior), torch.tensor(rows))[:, star]
    same(shares, rho[[0, star, 4, 9]])
    ratios = [ours / exact for ours, exact in (four, sixteen, sgd, one_form)]
    assert ratios == pytest.approx([0.67, 0.38, 0.9, 1], abs=0.12)
    for reward, found in zip(("CER", "exact match"), sixteen, strict=True):
        curve = train(reward, forms=16, slip=0.0, questions=1, seeds=100)[0].mean(0)
        assert (curve >= 0.8).int().argmax().item() == pytest.approx(found, rel=0.15)


def test_why_slips_shrink_cers_push(tmp_path):
    """What a dart in A, one in B and any dart get at the start, by exact match and by CER."""
    steps = """await go("race"); guess("race", 0); $("slips").click();
        for (const forms of [0, 2]) {
          draw({ forms });
          found.push([...$("leads").rows].slice(1).map(row => row.innerText.split("\\t").slice(1)));
        }"""
    for forms, found in zip((1, 4), in_browser(tmp_path, steps), strict=True):
        theta, phi = two_tables(1, forms, 0.3)
        prior, pi = (table.detach().squeeze(0).softmax(-1) for table in (theta, phi))
        means = pi[:, 0], pi @ exact_cer(prior, pi)[:, 0]
        of_all = [(prior @ mean).item() for mean in means]
        assert of_all[0] == pytest.approx(of_all[1])
        assert found == [[short(m[s]) for m in means] for s in (0, 1)] + [
            [short(x) for x in of_all]
        ]


def test_with_sgd_it_is_the_runs_without_luck_that_lower_exact_matchs_mean():
    """With 16 forms. When the run in the middle is right four times in five, and when the mean."""
    setting = dict(forms=16, slip=0.0, questions=1, seeds=200, optimizer=torch.optim.SGD, lr=8)
    runs = [train(reward, **setting)[0] for reward in ("CER", "exact match")]
    middle, mean = (
        [(of(run) >= 0.8).int().argmax().item() for run in runs]
        for of in (lambda run: run.median(0).values, lambda run: run.mean(0))
    )
    assert middle[1] < 1.25 * middle[0] and mean[1] > 1.3 * mean[0]


def test_a_walk_through_the_steps(tmp_path):
    """What each step says of its picture is compared with cer.py."""
    steps = """const seen = {};
        const note = name => seen[name] = { ...numbers(), words: ["model", "behind", "rewards"]
          .map(id => text(`${id}-words`)), step: section(state.step).textContent,
          fill: $("model").children[1].style.getPropertyValue("--share") };
        check("nothing before an answer", text("posterior"), "");
        $("known").children[1].click(); seen.hero = text("posterior");
        $("known").children[2].click();
        check("18", /gives “18” .089, and exact match 0/.test(text("posterior")));
        for (const step of order) { await go(step); note(step); }
        check("links", all("a").every(({ href }) => /#step-|^https:/.test(href)));
        await go("refs"); guess("refs", 0); $("refs").children[1].click(); note("two");
        await go("slip"); guess("slip", 0); note("slip"); $("rare").click(); note("rare");
        $("rare").click(); note("back");
        await go("all");
        check("before the guess", text("rewards-words"), "");
        check("nor any area", /area \\.\\d/.test(document.body.innerText), false);
        guess("all", 0); note("all");
        check("a wrong guess is told so", /Not “CER's”/.test(section("all").textContent));
        $("chips").children[2].click(); await go("level"); note("18"); return seen;"""
    seen = in_browser(tmp_path, steps)
    prior, likelihood = (torch.tensor(seen["all"][name]) for name in ("prior", "likelihood"))
    rho, area = exact_cer(prior, likelihood)[:, 0], short((prior @ likelihood)[0])
    assert "it was this" in seen["hero"] and f"CER gives “14 eggs” {short(rho[1])}" in seen["hero"]
    assert seen["exact"]["words"][0] == f"orange area {area}" and area in seen["exact"]["step"]
    assert [seen[step]["fill"] for step in ("exact", "spread", "row")] == ["0%", "50%", "50%"]
    assert seen["level"]["words"][1].endswith(f"= {short(rho[1])}")
    assert seen["18"]["words"][1].endswith(f"= {short(rho[2])}")
    assert seen["all"]["words"][2] == f"orange area {area}dashed area {area}"
    joint = prior[:, None] * likelihood
    either = (likelihood[:, 0] + likelihood[:, 1]) @ (joint / joint.sum(0))
    assert all(short(r) in seen["two"]["step"] for r in [*either, *rho])
    for step in "advantage", "slip", "rare", "back":
        k, g = seen[step]["k"], seen[step]["group"]
        check_group(g, likelihood)
        said = f"R of dart {k + 1} {short(g['R'][k])}advantage {short(g['A'][k])}"
        assert seen[step]["words"][2].replace("+", "") == said
    for step in "slip", "rare", "back":  # words and picture are of the same group
        R, A = seen[step]["group"]["R"][0], seen[step]["group"]["A"][0]
        said = seen[step]["step"].replace("\n", " ").replace("+", "")
        assert f"R is {short(R)}, its advantage {short(A)}." in said
    assert seen["rare"]["group"]["R"][0] > 3 * g["R"][0]
    changed = [i for i in range(8) if seen["rare"]["group"]["a"][i] != g["a"][i]]
    assert changed == [5, 6] and "Darts 6 and 7" in seen["rare"]["step"]


def test_the_reader_builds_a_reward(tmp_path):
    """Column by column, until it is R. Then without its own solution. Throwing again starts anew,
    and a dart lies where its numbers say."""
    steps = """await go("build");
        for (const j of [1, 7, 4]) $("built").children[j].click();
        found.push(text("behind-words"), numbers().group);
        for (const j of [0, 2, 3, 5, 6]) $("built").children[j].click();
        check("all", /All are in/.test(section("build").textContent));
        found.push(text("behind-words"));
        await go("own"); $("own").click(); found.push(text("behind-words")); guess("own", 1);
        found.push([...$("biased").rows].slice(1).map(row => row.innerText.split("\\t").slice(1)));
        $("copied").click(); found.push(text("behind-words"), numbers());
        $("own").click(); found.push(text("behind-words"));
        await go("darts");
        const places = () => all(".dart").flatMap(({ style }) =>
          [style.left, style.bottom].map(x => parseFloat(x).toFixed(3)));
        check("where they fall", places(), numbers().thrown.flatMap(([u, v]) =>
          [u, v].map(x => (100 * x).toFixed(3))));
        const before = places().join(); all(".throw")[0].click();
        check("others", places().join() !== before);
        const mine = state.seed; await go("slip"); await go("row");
        check("my group is still here", state.seed, mine);"""
    some, g, whole, without, biased, *copies, copied = in_browser(tmp_path, steps)
    W, P = torch.tensor(g["W"])[0], torch.tensor(g["P"])
    level = [short((W * P)[keep].sum() / W[keep].sum()) for keep in ([1, 7, 4], slice(1, 8))]
    assert [some, without] == [f"so far {level[0]}, ρ .443", f"without its own {level[1]}, ρ .443"]
    assert whole == f"R {short(g['R'][0])}, ρ .443"
    for rho, R, out in biased:
        assert float(R) == pytest.approx(float(rho), abs=0.006)
        assert abs(float(out) - float(rho)) > 0.01
    assert float(biased[2][2]) > float(biased[2][0])  # “18” without its own: too high
    assert copies[0] == "without its own .450, ρ .450" and copied == "R .450, ρ .450"
    check_group(copies[1]["group"], torch.tensor(copies[1]["likelihood"]))


def test_a_wall_is_dragged(tmp_path):
    """By pointer and by keys. Every number of the model follows, and there is a way back."""
    steps = """const wall = key => all(".wall").find(node => node.dataset.key === `wall ${key}`);
        const send = (node, type, more) => node.dispatchEvent(
          new PointerEvent(type, { bubbles: true, cancelable: true, ...more }));
        const drag = (key, x, y) => {
          const { left, bottom, width, height } = $("model").getBoundingClientRect();
          const place = wall(key).getBoundingClientRect();
          send(wall(key), "pointerdown", { clientX: place.x + place.width / 2,
            clientY: place.y + place.height / 2 });
          send(window, "pointermove", { clientX: left + x * width, clientY: bottom - y * height });
          send(window, "pointerup");
          send(window, "pointermove", { clientX: 0, clientY: 0 });  // no longer held
        };
        const press = (key, arrow) => wall(key).dispatchEvent(
          new KeyboardEvent("keydown", { key: arrow, bubbles: true }));
        const note = () => found.push({ ...numbers(), bars: all(".levels .meter")
            .map(node => [node.textContent, node.style.getPropertyValue("--share")]),
          levels: all('#rewards [data-key^="answer"]')
            .map(node => parseFloat(node.style.getPropertyValue("--share")) / 100) });
        const notice = () => $("changed").checkVisibility({ visibilityProperty: true });
        const height = () => $("stage").getBoundingClientRect().height;
        await go("model"); check("no notice yet", notice(), false);
        drag("1 0", .3, .5);  // along the wall, which does not move
        check("still no notice", notice(), false);
        const before = height();
        drag("2 1", .6, .9); note();  // B now mostly ends in 14 eggs
        check("the picture keeps its place", height(), before);
        drag("0 0", .3, .5); press("0 0", "ArrowRight");
        drag("3 2", .9, 5); press("1 0", "ArrowDown");
        for (const step of order.slice(0, 7)) { await go(step); check(step, notice()); }
        await go("all"); note();
        await go("darts");
        check("the darts hit the first model", numbers().prior, EGGS.prior);
        check("which is said", section("darts").textContent.includes("the first one again"));
        check("no way back where there is nothing to put back", notice(), false);
        await go("all"); $("reset").click(); note(); check("as before", notice(), false);"""
    found = in_browser(tmp_path, steps)
    first, second, reset = ([torch.tensor(g[k]) for k in ("prior", "likelihood")] for g in found)
    same(first[1][1].tolist(), torch.tensor([0.05, 0.85, 0.05, 0.05]))
    same(second[0].tolist(), torch.tensor([0.31, 0.49, 0.2]))
    same(second[1][0].tolist(), torch.tensor([0.49, 0.41, 0.05, 0.05]))
    same(second[1][2].tolist(), torch.tensor([0.03, 0.01, 0.95, 0.01]))  # a slice keeps a hundredth
    for g, model in zip(found, (first, second, reset), strict=True):
        rho = exact_cer(*model)[:, 0]
        same(g["rho"], rho)
        if model is not first:
            same(g["levels"], rho)
    for (said, share), rho in zip(found[0]["bars"], exact_cer(*first)[:, 0], strict=True):
        assert said == short(rho) and float(share[:-1]) == pytest.approx(100 * rho.item(), abs=1e-4)


def test_two_moves_are_bayes_rule(tmp_path):
    """The slices of an answer keep their areas in the first move, and their proportions in the
    second. Also for a reader who wants no motion."""
    steps = """await go("gather");
        for (const frame of [0, 1, 2]) {
          $("frames").children[frame].click();
          found.push([...$("behind").children].slice(0, 3).map(({ style }) =>
            ["width", "height", "--share"].map(x => parseFloat(style.getPropertyValue(x)) / 100)));
        }
        const { prior, likelihood } = numbers(); found.push([prior, likelihood]);"""
    *frames, model = in_browser(tmp_path, steps)
    joint = torch.tensor(model[0]) * torch.tensor(model[1])[:, 1]
    slices, tall, stretched = (torch.tensor(frame) for frame in frames)
    same((slices[:, 0] * slices[:, 1]).tolist(), joint)
    same(tall[:, :2].tolist(), torch.stack([joint, torch.ones(3)], 1))
    same(stretched[:, 0].tolist(), joint / joint.sum())
    assert (slices[:, 2] == tall[:, 2]).all() and (tall[:, 2] == stretched[:, 2]).all()


def test_the_matrix(tmp_path):
    """Its cells are W and P. Those that M leaves out are blank."""
    steps = """await go("columns"); guess("columns", 2);
        for (const one of [0, 1]) {
          $("M").children[one].click();
          const cells = [...$("matrix").children].slice(0, 72), { k, group } = numbers();
          found.push({ group, cells: cells.map(node => node.textContent),
            blank: cells.map(node => node.matches(".none")),
            lit: all("#matrix .lit")[0].style.bottom === cells[8 * k].style.bottom });
        }
        found.push(EGGS.likelihood, [...$("costs").rows].map(row => row.innerText));"""
    *matrices, likelihood, costs = in_browser(tmp_path, steps)
    of = [[*map(float, row.split("\t"))] for row in costs[1:]]  # M, mean, SD, rho
    assert [row[0] for row in of] == [8, 1] and of[1][2] > 3 * of[0][2]
    assert [of[0][1], of[1][1]] == pytest.approx([0.443] * 2, abs=0.01)
    for seen, M in zip(matrices, (8, 1), strict=True):
        g, likelihood = seen["group"], torch.as_tensor(likelihood)
        check_group(g, likelihood, M)
        W = [[("–" if w is None else short(w, 2)) for w in row] for row in g["W"]]
        asked = [any(row[j] is not None for row in g["W"]) for j in range(8)]
        P = [short(p, 2) if asked[j] else "–" for j, p in enumerate(likelihood[g["s"], 0].tolist())]
        assert seen["cells"] == sum([*W, P], []) and seen["lit"]
        assert seen["blank"] == [cell == "–" for cell in seen["cells"]]


def test_a_step_by_hand(tmp_path):
    """The walls move after the guess, and the guess is told right or wrong."""
    steps = """await go("same");
        const width = id => parseFloat(all(`#${id} .slice`)[0].style.width);
        for (let k = 0; k < 8; k++) {
          const before = ["first", "second"].map(width);
          check("no arrow yet", all("#squares .arrow").length, 0);
          $("hand").children[0].click();
          const moved = ["first", "second"].map((id, i) => width(id) - before[i]);
          const right = /That is right/.test(section("same").textContent);
          const hits = runOf("exact match", STEPS.same)[k].R.filter(Boolean).length;
          found.push([...moved, right, hits]); $("again").click();
        }"""
    found = in_browser(tmp_path, steps)
    for exact, ours, right, hits in found:
        assert right == (abs(exact) >= abs(ours) and abs(exact) > 0.2)
        assert hits or exact == 0
    assert sum(not hits for *_, hits in found) >= 3 and max(abs(row[0]) for row in found) > 4
    assert 6 > max(abs(row[1]) for row in found) and sum(row[1] > 0 for row in found) >= 6


SIZES = [(1280, 800), (820, 1180), (390, 844), (844, 390), (640, 400)]


def test_the_text_of_each_step_can_be_read(tmp_path):
    """At each size every paragraph, heading and button of a step can be scrolled to a place where
    nothing covers it, and nothing is wider than the window."""
    source = json.dumps((DOCS / "explore.html").read_text()).replace("</", "<\\/")
    steps = """for (const [width, height] of SIZES) {
          const frame = document.body.appendChild(document.createElement("iframe"));
          Object.assign(frame, { width, height, srcdoc: SOURCE });
          await new Promise(done => frame.onload = done);
          const { contentWindow: page, contentDocument: inside } = frame;
          const sections = [...inside.querySelectorAll(".step")];
          for (const guess of inside.querySelectorAll(".guess")) guess.classList.add("done");
          for (const step of sections) {
            page.enter(step.dataset.step);
            for (const node of step.querySelectorAll("p, h2, h3, button, label")) {
              if (!node.checkVisibility() || !node.textContent.trim()) continue;
              const seen = ["center", "end", "start"].some(block => {
                node.scrollIntoView({ block });
                const { left, top, width: w, height: h } = node.getClientRects()[0];
                const y = top + Math.min(h / 2, 12);
                return step.contains(inside.elementFromPoint(left + w / 2, y));
              });
              check(`${step.dataset.step} ${width}: ${node.textContent.slice(0, 40)}`, seen);
            }
            check(step.dataset.step, inside.documentElement.scrollWidth <= width);
          }
          found.push(sections.length); frame.remove();
        }"""
    steps = f"const SIZES = {json.dumps(SIZES)}, SOURCE = {source}; {steps}"
    assert in_browser(tmp_path, steps, page=None) == [19] * len(SIZES)


def test_the_group_of_the_troll(tmp_path):
    """The page's real group is the README's. Its numbers are those of its file and of cer.py."""
    steps = """await go("troll"); const seen = {};
        const told = () => /a third\\s+of\\s+the width/.test(document.body.innerText);
        check("its answer comes after the guess", told(), false);
        guess("troll", 1); check("its text", told());
        const names = [...$("chips").children].map(node => node.textContent);
        BEST.forEach((i, k) => {
          all("#rewards .slice")[k].click();
          const words = ["behind", "rewards"].map(id => text(`${id}-words`));
          (seen[TROLL.answers[i]] ??= []).push(words);
        });
        $("chips").children[3].click(); check("the first “3”", /✓ 3$/.test(text("behind-title")));
        found.push(TROLL, seen, names, section("troll").textContent.replace(/\\s+/g, " "));"""
    page, seen, names, told = in_browser(tmp_path, steps)
    with TROLL.open() as file:
        ours = json.loads(file.readline())
    for name in "answers", "R", "distinct_answers", "columns", "log_W", "log_P":
        assert page[name] == ours[name]
    # … stands for what is left out
    for text, whole in zip(page["texts"], ours["texts"], strict=True):
        assert whole.endswith(text.split("… ")[-1].split("[…] ")[-1])
    R = cer(torch.tensor(ours["log_W"]), torch.tensor(ours["log_P"])).tolist()
    R = dict(zip(ours["distinct_answers"], R, strict=True))
    P = dict(zip(ours["columns"], torch.tensor(ours["log_P"]).exp().tolist(), strict=True))
    for answer, reward in R.items():
        own = [p for i, p in P.items() if ours["answers"][i] == answer]
        said = [words.split("P of its own solution ") for words, _ in seen[answer]]
        level = short(reward) if reward > 5e-4 else "4e-5"
        assert {r for r, _ in said} == {f"R {level}"}
        assert {r.split("advantage")[0] for _, r in seen[answer]} == {f"R {level}"}
        expected = sorted(short(p, 4) if p > 5e-5 else "4e-5" for p in own)
        assert sorted(p for _, p in said) == expected
    right = {name[2:] for name in names if name[0] == "✓"}
    assert right == {"three", "three days", "three whole days", "3"}
    assert [short(R[answer]) for answer in ("3", "a few days")] == [".100", ".042"]
    assert "P is .0001" in told and "(.100 and .042)" in told
    row = torch.tensor(ours["log_W"])[ours["distinct_answers"].index("3")].softmax(0).tolist()
    words = sum(
        w for i, w in zip(ours["columns"], row, strict=True) if ours["answers"][i] in right - {"3"}
    )
    assert 0.3 < words < 0.37  # “a third of its row”


def group(step, R=None, **more):
    """One line of a run's file: four samples, of which the second is cut off. R: samples.jsonl."""
    line = {"step": step, "question": "Ana has\n\n3 bags.", "references": ["14", "14 eggs"]}
    line |= {"answers": ["14", None, "<img src>", "14"], "truncated": [False, True, False, False]}
    line |= {"texts": [r"So \boxed{14}", "I count the\neggs and", "<img src>", "14!"]}
    return json.dumps(line | ({"R": R} if R else {}) | more) + "\n"


def test_the_files_of_a_run(tmp_path, finished_run):
    matrices = {"distinct_answers": ["14", "<img src>"], "columns": [0, 2, 3]}
    matrices |= {"log_W": [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]], "log_P": [-1, -5, -2]}
    R = cer(torch.tensor(matrices["log_W"][0]), torch.tensor(matrices["log_P"])).item()
    run = group(1, [0.4, 0, 0.1, 0.4], **matrices)
    run += group(2, [0.5] * 4, right=[True, None, False, None], **matrices)
    no_box = dict.fromkeys(["distinct_answers", "columns", "log_W", "log_P"], [])
    no_box = group(3, [0.0] * 4, right=[False] * 4, answers=[None] * 4, **no_box)
    evaluated = group(4, right=[True, False, False, True], index=7, dataset="x.jsonl")
    bad = [group(1, [0.5] * 3), "null\n", '{"text": {}}\n', group(1, [0] * 4, log_W=[[9]])]
    bad += [group(1, [0] * 4, right=["right"] * 4), '{"question": "half a li']
    files = [(finished_run / f"{name}.jsonl").read_text() for name in ("samples", "evaluations")]
    troll = TROLL.read_text()
    steps = f"""const shown = id => $(id).checkVisibility();
        const names = () => [...$("samples").children].map(node => node.textContent);
        const words = id => $(id).lastElementChild.textContent.replace(/\\s+/g, " ");
        check("no group yet", shown("run"), false);
        await open("{{");
        check("a broken file", text("opened"), "f cannot be shown: line 1 is no JSON.");
        await open({json.dumps(troll)});
        for (const sample of names().keys()) {{
          $("samples").children[sample].click();
          if (shown("behind")) check("its level is R", words("behind").slice(4).split(",")[0],
            words("rewards").slice(2).split(",")[0]);
        }}
        await open({json.dumps(run)} + "\\n  \\n{{");
        check("a bad line", text("opened"), "f: 2 groups. Left out: 1 (line 5 is no JSON).");
        check("the best", [text("samples"), words("rewards"), words("behind")].join("|"),
          "1414<img src>(no answer)|R .400, advantage +.233|CER {short(R)}" +
            ", P of its own solution .3679");
        check("a box", text("text") + document.querySelectorAll("mark").length,
          "Sample 1\\n\\nSo 141");
        check("all references", text("asked").endsWith("Reference: 14 or 14 eggs (verbatim in 2 " +
          "samples). P is the sum of their probabilities."));
        $("index").value = 2; $("index").onchange({{ target: $("index") }});
        check("who is right", names().sort(), "(no answer),14,✓ 14,✗ <img src>");
        const hues = [...document.querySelectorAll("#behind i")].map(node => node.className[0]);
        check("hues", hues.sort(), "A,B,C");
        $("samples").children[2].click();
        check("hostile texts", text("text").endsWith("<img src>") && !document.images.length);
        for (const line of {json.dumps(bad)}) {{
          await open(line);
          check("the file", /^f cannot be shown: line 1 (has no|is no JSON)/.test(text("opened")));
          check("one line number", text("opened").match(/line/g).length, 1);
          check("the group that was open", groups.length, 2);
          check("its name", text("opened").endsWith("Below is still f."));
        }}
        await open({json.dumps(no_box)});
        check("no box", ["boxless", "behind", "rewards"].map(shown), "true,false,false");
        check("no verdict without an answer", names(), Array(4).fill("(no answer)"));
        await open({json.dumps(evaluated)});
        check("an evaluation", [shown("boxless"), shown("rewards"), ...names()],
          "false,false,✓ 14,✓ 14,(no answer),✗ <img src>".split(","));
        for (const file of {json.dumps(files)}) {{
          await open(file);
          found.push([groups.length, $("samples").children.length]);
        }}"""
    assert in_browser(tmp_path, steps, "samples.html") == [[8, 4], [9, 2]]
