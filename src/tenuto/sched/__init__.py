"""The scheduler: it decides which turns run, how many tokens each gets, and which yield memory under pressure."""
