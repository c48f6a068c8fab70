"""In a search: cheap tests on each candidate, trainings beside the baseline for the first; what fails is dropped."""
