"""What the ways into other trainers share: settings applied inside of them, and a look at their pace."""
