"""The tables, as steps: step N brings a database of version N - 1 to version N. A step that was released never changes.

owners    owner, bytes            what each owner takes, kept by triggers
objects   owner, id, kind, parent, body (JSON), data (bytes), size, created, changed
rows      job, number, state, ended, given, result      the rows of a job; `ended` counts them as they end
An object goes with its parent, and rows go with their job.
"""

STEPS = (
    """
    CREATE TABLE owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE objects (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        kind TEXT NOT NULL,
        parent INTEGER REFERENCES objects ON DELETE CASCADE,
        body TEXT NOT NULL,
        data BLOB,
        size INTEGER NOT NULL,
        created REAL NOT NULL,
        changed REAL NOT NULL,
        UNIQUE (owner, id)
    );
    CREATE INDEX by_kind ON objects (owner, kind, changed);
    CREATE INDEX by_parent ON objects (parent) WHERE parent IS NOT NULL;
    CREATE INDEX jobs ON objects (number) WHERE kind = 'job';
    CREATE INDEX by_age ON objects (changed) WHERE parent IS NULL;
    CREATE TRIGGER added AFTER INSERT ON objects BEGIN
        INSERT INTO owners VALUES (new.owner, new.size) ON CONFLICT DO UPDATE SET bytes = bytes + new.size;
    END;
    CREATE TRIGGER resized AFTER UPDATE OF size ON objects BEGIN
        UPDATE owners SET bytes = bytes + new.size - old.size WHERE owner = new.owner;
    END;
    CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
        UPDATE owners SET bytes = bytes - old.size WHERE owner = old.owner;
        DELETE FROM owners WHERE owner = old.owner AND bytes <= 0;
    END;
    CREATE TABLE rows (
        job INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE,
        number INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'waiting',
        ended INTEGER,
        given TEXT NOT NULL,
        result TEXT,
        PRIMARY KEY (job, number)
    ) WITHOUT ROWID;
    CREATE INDEX by_state ON rows (job, state, number);
    CREATE INDEX by_end ON rows (job, ended) WHERE ended IS NOT NULL;
    """,
)
