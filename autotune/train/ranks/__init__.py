"""A workload's training by several processes of one machine: who starts them, what they tell each other, who leads."""
