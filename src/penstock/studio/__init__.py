"""The planner to play with: a page that asks, and the answers that the planning half gives.

    penstock studio                       # a small server on this machine, and the page in a browser
    penstock studio --build FOLDER        # the same page with the planning half inside it, to open or to send

`answer` makes the answers, with or without a browser:

    >>> from penstock.studio import Question, answer
    >>> answer(Question(schedule="zbv", ranks=4, microbatches=8), "compare")["rows"][0]["makespan"]
    25.5
"""

from __future__ import annotations

from penstock.studio.answers import Question, answer

__all__ = ["Question", "answer"]
