"""The reference objectives and advantages that every other paper is measured against."""
