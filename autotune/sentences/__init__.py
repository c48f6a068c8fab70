"""Sentences that more than one surface says: the terminal, the report, the notes of a search. By subject, pure."""
