"""Assignments: what a student is given of a master, and what a notebook that was handed in is worth.

markers.py   the language of a master: which cells are answers and checks, what of them a student sees
expect.py    what check cells say about an answer: its form, whether it is right, what a wrong one gives away
handed_in.py a student's notebook with the master's checks in it, whatever was done to them
grade.py     run it, and say what it is worth
"""

from pipelab.grading.expect import check, expect, expect_entries, expect_list, expect_tensor
from pipelab.grading.grade import Grade, Mark, grade
from pipelab.grading.markers import AssignmentError

__all__ = [
    "AssignmentError",
    "Grade",
    "Mark",
    "check",
    "expect",
    "expect_entries",
    "expect_list",
    "expect_tensor",
    "grade",
]
