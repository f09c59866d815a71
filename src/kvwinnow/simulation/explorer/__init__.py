"""What eviction policies did to one prompt, as one page to look at."""
