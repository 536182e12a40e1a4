"""Masking secrets: tokens, keys and passwords do not belong into files, logs or messages."""

from __future__ import annotations

import re

MASK = "<masked>"
NAMES = re.compile(
    r"(^|[-_.])(token|key|api_?key|password|passwd|passphrase|pwd|secret|auth|authorization|bearer|jwt|credentials?)$"
)
"""Names of options and parameters whose value is a secret, in lower case."""
SPECIAL = re.compile(r"(^|[-_.])(pad|eos|bos|unk|cls|sep|mask|start|stop|end|special|image|audio|video)[-_]token$")
"""Names of tokens of a vocabulary."""
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Borders of the words in a name like hubToken."""
CREDENTIALS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,30}:/{1,2})[^/\s@]+@")
"""The user and password of a URL, also of one that was read as a path, which has one slash.

Lengths are bounded, so that the time of a search grows with the text only.
"""
PARAMETERS = re.compile(r"([?&;#]([^?=&;#\s]+)=)([^&;#\s]+)")
"""The parameters of a URL."""
PAIRS = re.compile(r"""(["']([\w.-]{1,60})\\*["']\s{0,9}:\s{0,9}(\\*["']))(.*?)(?=\3)""")
"""A name and a text in JSON, in a Python dict, or in JSON inside of JSON."""
HEADER = re.compile(
    r"""(\bauthorization['"]?\s{0,9}[:=]\s{0,9}['"]?(?:bearer |basic |token )?|\bbearer )[\w.~+/=-]{8,}""", re.I
)
"""The header of a request that has a token or a password."""
TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}|"
    r"AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
"""Tokens that are known by their form: Hugging Face, GitHub, GitLab, OpenAI, AWS, Google, Slack, JSON web tokens."""


def is_secret(name: str) -> bool:
    """Whether an option or parameter of this name holds a secret."""
    name = WORDS.sub("_", name.lstrip("-")).lower()
    return NAMES.search(name) is not None and SPECIAL.search(name) is None


def masked_text(text: str) -> str:
    """A text without credentials of URLs, parameters and entries of secret names, and tokens known by their form."""
    text = CREDENTIALS.sub(rf"\1{MASK}@", text)
    text = PARAMETERS.sub(lambda found: found[1] + (MASK if _is_secret_parameter(found[2]) else found[3]), text)
    text = PAIRS.sub(lambda found: found[1] + (MASK if is_secret(found[2]) else found[4]), text)
    text = HEADER.sub(rf"\1{MASK}", text)
    return TOKENS.sub(MASK, text)


def masked_words(words: list[str]) -> list[str]:
    """A command line without secrets: `--hub_token X`, `--auth=X`, `hub_token=X`, and those inside of URLs."""
    result, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = is_secret(name) and (name.startswith("-") or bool(equals)) and "://" not in name
        result.append(MASK if hide else f"{name}={MASK}" if secret and equals else masked_text(word))
        hide = secret and not equals
    return result


def _is_secret_parameter(name: str) -> bool:
    return is_secret(name) or name.lower() in ("sig", "signature", "x-amz-signature", "x-amz-security-token")
