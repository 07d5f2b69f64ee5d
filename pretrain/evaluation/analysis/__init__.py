"""What trained models with token tables, and models without, do with rare and common tokens: measured on ranks."""
