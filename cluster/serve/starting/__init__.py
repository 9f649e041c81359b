"""The start of an application, and the causes of a failed one."""
