"""What is loaded for a model: its weights in their formats, and what drafts for it, from files of their own."""
