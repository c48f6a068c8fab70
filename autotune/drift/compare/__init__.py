"""Pure: two arms of records in, what differs and how surely out; no torch."""
