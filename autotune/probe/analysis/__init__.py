"""What the facts mean: the limit, the bound, the advice, the troubles. Records in, records out; pure."""
