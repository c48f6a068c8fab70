"""What trainings leave behind: their folders, one beside another, and what is at work."""
