"""CER in its own case: rows with people's questions on passages, for judge.py and grade.py.

    python benchmarks/own_case.py rows squad_human.jsonl --lines 100-399 --out squad.jsonl

Each line of the file has a passage, a question, and references, what several people have answered.
A row is {"question": worked examples, passage and question, "answer": all references}. Two worked
examples stand before each passage, because the model that is judged (Qwen2.5-Coder-1.5B-Instruct)
hardly ever boxes its answer without them.
"""

import argparse
import json
from pathlib import Path

EXAMPLES = r"""Answer a question about a passage. Reason in one sentence, then box a short answer, as in the examples.

Passage: The Ashford Canal was dug between 1788 and 1796 by teams of local farmers, who were paid in grain. It was closed to ships in 1921, when the railway bridge made its locks useless.
Question: Why did ships stop using the canal?
Solution: The passage says that it was closed when the railway bridge made its locks useless. \boxed{the railway bridge}

Passage: Lichens grow slowly, often less than a millimetre a year. Because they take in everything from the air, they are used to measure its pollution.
Question: What can be measured with lichens?
Solution: They take in everything from the air, so they are used to measure how polluted it is. \boxed{air pollution}
"""  # noqa: E501


def numbers(text):
    """ "3,5-7" -> [3, 5, 6, 7]"""
    spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
    return [k for span in spans for k in range(span[0], span[-1] + 1)]


def rows(lines):
    """-> rows for judge.py."""
    return [
        {
            "question": f"{EXAMPLES}\nPassage: {line['passage']}\n"
            f"Question: {line['question'].strip()}\nSolution:",
            "answer": line["references"],
        }
        for line in lines
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("rows", help="make rows for judge.py")
    make.add_argument("file", type=Path)
    make.add_argument("--lines", required=True, help="which lines, from 0, such as 3,5,100-399")
    make.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.file.open()]
    lines = [lines[k] for k in numbers(args.lines)]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows(lines)))
    print(f"{args.out}: {len(lines)} rows")


if __name__ == "__main__":
    main()
