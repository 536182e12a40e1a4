"""Masking secrets: tokens, keys and passwords do not belong into files, logs or messages."""

from __future__ import annotations

import re

MASK = "<masked>"
NAMES = re.compile(r"(^|[-_.])(token|key|password|passwd|pwd|secret|auth|credentials?)$", re.IGNORECASE)
"""Names of options and parameters whose value is a secret."""
CREDENTIALS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,30}:/{1,2})[^/\s@]+@")
"""The user and password of a URL, also of one that was read as a path, which has one slash.

Lengths are bounded, so that the time of a search grows with the text only.
"""
PARAMETERS = re.compile(r"([?&;]([^?=&;#\s]+)=)([^&;#\s]+)")
"""The parameters of a URL."""
TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|AKIA[0-9A-Z]{16})\b")
"""Tokens that are known by their form: Hugging Face, GitHub, OpenAI, AWS."""


def is_secret(name: str) -> bool:
    """Whether an option or parameter of this name holds a secret."""
    return NAMES.search(name.lstrip("-")) is not None


def masked_text(text: str) -> str:
    """A text without the credentials of URLs, secret parameters of URLs, and tokens that are known by their form."""
    text = CREDENTIALS.sub(rf"\1{MASK}@", text)
    text = PARAMETERS.sub(lambda found: found[1] + (MASK if _is_secret_parameter(found[2]) else found[3]), text)
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
