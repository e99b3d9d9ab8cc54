"""Terminal, notebooks and PDF report."""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# Altair loads jsonschema, which would build this grammar in over a second, for a check unasked.
