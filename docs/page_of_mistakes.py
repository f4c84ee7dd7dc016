"""The page of mistakes at the command, made from the list that the tests run.

python docs/page_of_mistakes.py            # writes it
python docs/page_of_mistakes.py --check    # exit code 1 if it is not what the list says
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "messages.md"
BEGIN, END = (
    "<!-- mistakes: python docs/page_of_mistakes.py -->\n",
    "<!-- end of the mistakes -->\n",
)

sys.path.insert(0, str(ROOT / "tests"))
from support.typed_mistakes import MISTAKES  # noqa: E402  that folder is on the path of tests alone


def mistakes() -> str:
    """Return a section per heading, each mistake as it is typed with the line below it."""
    text = ""
    for heading, rows in MISTAKES.items():
        block = "\n\n".join(f"$ {typed}\n{line}" for typed, line in rows)
        text += f"\n### {heading}\n\n```text\n{block}\n```\n"
    return f"{text}\n"


def main() -> int:
    """Write the page, or look whether it is what the list says."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}{mistakes()}{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
