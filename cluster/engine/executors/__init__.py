"""Executors in the engine's process: one step at a time, or one behind another."""
