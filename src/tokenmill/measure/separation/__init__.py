"""What `tokenmill bench pd` measures: prompts on workers of their own, against prompts beside the streams that decode."""
