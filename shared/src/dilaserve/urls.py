"""Server URLs as they may be shown in logs and errors."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"//[^@/]*@")


def without_secrets(url: str) -> str:
    """The URL, or several in one string, with user names and passwords replaced by `***`."""
    return _USER_INFO.sub("//***@", url)
