"""Messages, docstrings, comments and pages: plain English and the field's terms.

Every string literal of two or more words that is not a docstring counts as a message: errors, warnings, logs, help
texts and the reasons that reports quote. A message has at most two short sentences.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from loopwright.errors import first_line, some

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "loopwright"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FEWEST_WORDS = 2
MOST_SENTENCES = 2
MOST_WORDS = 35

# What is refused, and what to write instead.
DIALECT = {
    r"nobody|whoever|somebody|everybody|anybody|everyone": "name who: the user, a callback, a rank",
    r"theirs|ours": "name the thing",
    r"told|tells?": "passed, given, shows, distinguishes",
    r"minded|minds": "honoured, checked",
    r"stand-ins?": "dummy batch",
    r"keeps? company": "dummy batch",
    r"go(?:es|ing)? on|went on|gone on": "continue, resume",
    r"(?:as|stay as) (?:it was|they (?:are|were)) made|stays? as (?:it is|they are)": "keeps the collator's batches",
    r"as made|as the collator makes": "keeps the collator's batches",
    r"laid out anew|anew|afresh": "again, from scratch",
    r"cuts?|cutting": "split, truncated, unreachable",
    r"thereby|hence": "so",
    r"from here on": "from now on",
    r"meeting point": "rendezvous",
    r"tried out|looked at": "tested, checked",
    r"spread over": "sharded across, split across",
    r"weighed": "weighted",
    r"filled up|fill up": "padded",
    r"equally many|no whole numbers?|(?:is|are) none of": "the same number, not integers, not one of",
    r"stays? what": "is unchanged",
    r"knows? no|knows? only|does not know": "does not support, has no",
    r"(?<!there )(?:is|are) no (?!longer)\w+": "is not a ...",
    r"all the same|say it (?:as|like)|the same words": "anyway, use the form",
    r"that is there|is not there|was not there|not there now": "exists, does not exist",
    r"whatever": "any, all",
    r"wish(?:es)?|ask(?:s|ing)?|asked for|(?:is|are|was|were|be) asked": "requests, sets, reads",
    r"look(?:s|ed|ing)? (?:at|for)|a look": "checks, inspects, searches",
    r"stands?|stood": "the position is, the state is",
    r"hears?|speaks?|remembers?|forgets?|knows?|(?:say|says|said) so": "receives, stores, has, is set",
    r"travel(?:s|led)?": "is copied, is saved in",
    r"weighs?": "is weighted",
    r"whole numbers?": "integers",
    r"in words": "as text",
    r"gives? way": "is overridden",
    r"takes? part": "is used",
    r"(?:comes?|came) of it": "the result",
    r"strikes?": "is injected",
    r"rooms?": "package, space",
}
WORDS = re.compile(r"\b(?:" + "|".join(DIALECT) + r")\b", re.IGNORECASE)
QUOTED = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
CODE = re.compile(r"```.*?```", re.DOTALL)

# Texts that are pages or scripts, by file and first words.
LONGER = {
    ("cli/commands/check.py", "Try a configuration"): "the description of a command",
    ("cli/commands/completion.py", "# bash: eval"): "a shell script",
    ("cli/commands/docs.py", "# What is refused"): "a page of the documentation",
    ("cli/commands/doctor.py", "Show devices"): "the description of a command",
    ("cli/commands/dryrun.py", "Compile the whole"): "the description of a command",
    ("cli/commands/launch.py", "Run a script"): "the description of a command",
    ("cli/commands/report.py", "Write report.html"): "the description of a command",
    ("cli/commands/watch.py", "Show a run"): "the description of a command",
    ("launch/slurm.py", "#!/bin/bash"): "a shell script",
}


# Messages still to be rewritten, by file and first words.
WAITING: set[tuple[str, str]] = set()


class Message(NamedTuple):
    """A text a user may read, with a letter in place of every value."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def text_of(node: ast.AST) -> str | None:
    """The text of a literal; X stands for a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
    return None


def literals(node: ast.AST) -> Iterator[ast.AST]:
    """Every string below a node, f-strings as one, docstrings left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and text_of(child.value) is not None:
            continue
        if text_of(child) is None:
            yield from literals(child)
            continue
        yield child
        for part in getattr(child, "values", []):
            if isinstance(part, ast.FormattedValue):
                yield from literals(part)


def messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in literals(ast.parse(path.read_text(encoding="utf-8"))):
            text = text_of(node) or ""
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= FEWEST_WORDS and " " in text:
                yield Message(file, node.lineno, text)


def sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text) if each.strip()]


def is_listed(message: Message, listed: Iterable[tuple[str, str]]) -> bool:
    return any(message.file == file and message.text.startswith(start) for file, start in listed)


def refused(text: str) -> Iterator[str]:
    yield from (f"the word '{found.group()}'" for found in WORDS.finditer(QUOTED.sub("", text)))


def problems(message: Message) -> Iterator[str]:
    if not is_listed(message, WAITING):
        yield from refused(message.text)
    if is_listed(message, LONGER):
        return
    parts = sentences(message.text)
    if len(parts) > MOST_SENTENCES:
        yield f"{len(parts)} sentences"
    longest = max(len(each.split()) for each in parts)
    if longest > MOST_WORDS:
        yield f"a sentence of {longest} words"


def test_messages_are_plain_and_short() -> None:
    listed = [f"{message}\n    -> {', '.join(wrong)}" for message in messages() if (wrong := list(problems(message)))]

    assert not listed, f"{len(listed)} messages to rewrite:\n" + "\n".join(listed)


def test_every_exception_is_still_needed() -> None:
    collected = list(messages())

    unused = [key for key in (*LONGER, *WAITING) if not any(is_listed(each, [key]) for each in collected)]

    assert not unused


def docstrings_and_comments() -> Iterator[Message]:
    """Comments and triple-quoted strings, of which all but a few pages of text are docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        with path.open(encoding="utf-8") as source:
            for token in tokenize.generate_tokens(source.readline):
                is_string = token.type == tokenize.STRING and token.string.startswith('"""')
                if is_string or token.type == tokenize.COMMENT:
                    yield Message(file, token.start[0], token.string)


def test_docstrings_and_comments_use_the_terms_of_the_field() -> None:
    listed = [
        f"{note}\n    -> {', '.join(wrong)}"
        for note in docstrings_and_comments()
        if (wrong := list(refused(note.text)))
    ]

    assert not listed, f"{len(listed)} docstrings or comments to rewrite:\n" + "\n".join(listed)


def lines_of_prose() -> Iterator[Message]:
    """The lines of the pages, without code and headings: other pages link to headings."""
    for page in PAGES:
        text = CODE.sub(lambda code: "\n" * code.group().count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(text.split("\n"), 1):
            if line and not line.startswith("#"):
                yield Message(page.relative_to(ROOT).as_posix(), number, line)


def test_pages_use_the_terms_of_the_field() -> None:
    listed = [f"{line}\n    -> {', '.join(wrong)}" for line in lines_of_prose() if (wrong := list(refused(line.text)))]

    assert not listed, f"{len(listed)} lines to rewrite:\n" + "\n".join(listed)


def test_the_first_line_of_an_error_exists_without_a_message() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(OSError()) == "OSError"


def test_of_many_names_the_first_are_listed() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(map(str, range(1234)), 2) == "0, 1 and 1,232 more"
