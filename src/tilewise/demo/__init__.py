"""The main job: train a small GPT on real text with tilewise and with torch's SDPA, measure both, and write a report page."""
