"""Low-rank adapters (LoRA): PEFT's folders, and the values of the adapters that a rank holds."""
