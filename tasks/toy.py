r"""The default task. It is free-form, and small enough to watch CER work in minutes on a CPU.

Questions ask for a number ("Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?"). A
completion is one line of working and a box. The number may be boxed in any of 8 forms: "14",
"fourteen", "14 eggs", "it is 14", ... The *reference is one of the 8 at random*, so exact match
rewards a right number one time in eight. This is the paper's situation on a small scale.
"""

import itertools
import random
import re
from dataclasses import dataclass

NAMES = ["Ana", "Ben", "Eva", "Tom", "Mia", "Leo"]
UNITS = ["apples", "books", "coins", "cards", "eggs", "pens"]
ONES = "zero one two three four five six seven eight nine".split()
ONES += "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
FORMS = ["{n}", "{word}", "{n} {unit}", "{word} {unit}"]
FORMS += ["it is {n}", "it is {word}", "{n} in total", "{word} in total"]


def in_words(n):
    if n < 20:
        return ONES[n]
    return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")


NUMBERS = {str(n): n for n in range(100)} | {in_words(n): n for n in range(100)}


# ----------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Story:
    method: int  # which of the three kinds of question, and so the right way to solve it
    name: str
    unit: str
    n: int
    a: int
    b: int

    @property
    def combination(self):
        """What has to be worked out: the kind of question and its three numbers."""
        return self.method, self.n, self.a, self.b

    def question(self):
        text = [
            "{name} has {n} bags of {a} {unit} and {b} more {unit}. How many {unit}?",
            "{name} has {n} bags of {a} {unit} and puts {b} more in each. How many {unit}?",
            "{name} has {n} red, {a} blue and {b} green {unit}. How many {unit}?",
        ][self.method]
        return text.format(**vars(self))

    def work(self, method):
        """Apply a method to the numbers of this story -> (first step, first result, second step,
        second result)."""
        n, a, b = self.n, self.a, self.b
        return [
            (f"{n}*{a}", n * a, f"{n * a}+{b}", n * a + b),
            (f"{a}+{b}", a + b, f"{n}*{a + b}", n * (a + b)),
            (f"{n}+{a}", n + a, f"{n + a}+{b}", n + a + b),
        ][method]

    def answer(self, form, value):
        return form.format(n=value, word=in_words(value), unit=self.unit)


def stories(seed=1234, withheld=()):
    """All 6,480 stories in random order -> the 200 held-out ones, the others. Those of a withheld
    combination are in neither list."""
    grid = itertools.product(range(3), NAMES, UNITS, range(2, 5), range(2, 7), range(1, 5))
    all_stories = [Story(*values) for values in grid]
    random.Random(seed).shuffle(all_stories)
    test, train = all_stories[:200], all_stories[200:]
    return [[s for s in part if s.combination not in withheld] for part in (test, train)]


def rows(name):
    """The rows of "toy-test" (200 held-out problems) or "toy" (2,000 to train on). The form of each
    reference is drawn once. The verifier in training compares digits only, as a simple rule would.
    The verifier in evaluation reads all 8 forms."""
    test, train = stories()
    if name == "toy-test":
        chosen, verifier, rng = test, "toy-truth", random.Random("4321 test")
    else:
        chosen, verifier, rng = train[:2000], "toy-rule", random.Random("4321 train")
    problems = []
    for story in chosen:
        answer = story.answer(rng.choice(FORMS), story.work(story.method)[3])
        problems.append({"question": story.question(), "answer": answer, "verifier": verifier})
    return problems


def demonstration(rng, train):
    """-> (prompt, completion). The arithmetic is right; the method is right 37% of the time."""
    story = rng.choice(train)
    wrong = [m for m in range(3) if m != story.method]
    first, x, second, value = story.work(story.method if rng.random() < 0.37 else rng.choice(wrong))
    # The working may include the unit, which makes a form with the unit likelier, and it may stop
    # before the result.
    unit = f" {story.unit}" if rng.random() < 0.5 else ""
    working = f"{first}={x}{unit}; {second}" + (f"={value}{unit}" if rng.random() < 0.5 else "")
    weights = [0.6 if ("unit" in form) == bool(unit) else 0.4 for form in FORMS]
    answer = story.answer(rng.choices(FORMS, weights)[0], value)
    return story.question() + "\n", f"{working}\n\\boxed{{{answer}}}"


def value_of(answer):
    """The number that an answer states in the words of the 8 forms, or None."""
    return NUMBERS.get(re.sub(rf"^it is | in total$| ({'|'.join(UNITS)})$", "", answer))


def same_number(answer, reference):
    """Whether both state the same number, in any of the forms. This decides pass@1 on toy-test."""
    return value_of(answer) is not None and value_of(answer) == value_of(reference)


def same_digits(answer, reference):
    """Whether both have the same digits, like a hand-written rule, which cannot read words."""
    ours, theirs = re.findall(r"\d+", answer), re.findall(r"\d+", reference)
    return answer == reference or (len(ours) == 1 and ours == theirs)
