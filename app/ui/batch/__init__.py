"""The batch tab: many texts, one record each."""
