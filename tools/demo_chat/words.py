"""Words that fill the dialogues' slots."""

NAMES = """Ann Anna Alice Bob Ben Carl Carla Chris Clara Dan David Diana Emil Emma Eva Eve Felix Finn Frank Fred George Grace
Greta Hannah Harry Helen Henry Ian Ida Igor Ines Ivan Jack James Jane Jim Joan Joe John Jonas Julia Kai Karen Kate Kim Lara Laura
Lea Leo Lena Liam Lily Lisa Lola Lou Lucy Luis Luke Maria Mark Marta Martin Mary Max Maya Mia Mike Mila Nadia Nick Nina Noah Nora
Oliver Olga Oscar Otto Pablo Paul Paula Peter Petra Pia Pierre Priya Rachel Ravi Rita Robert Robin Rosa Ruth Sam Sara Sarah Sofia
Sophie Stefan Steve Susan Tom Tim Tina Theo Tara Ursula Vera Victor Wei Wendy William Xavier Yara Yuki Yusuf Zoe Ahmed Ali Amir
Fatima Omar Hiro Kenji Mei Ming Chen Li Raj Anil Deepa Sanjay Tomas Jan Piotr Ola Lars Sven Bjorn Astrid Pedro Jose Juan Ana
Marco Luca Giulia Matteo Elena Dmitri Sergei Natasha Kofi Ama Zara Jamal Aisha Alex Andrea Andy Charlie Sasha Toni Jo Pat Lee
Michael Daniel Thomas Kevin Brian Jennifer Jessica Linda Patrick Simon Philip Samuel Anthony Edward Richard Joseph""".split()

PETS = "Rex Bello Fluffy Luna Milo Bella Rocky Whiskers Shadow Tiger Snowy Buddy Coco Oreo Spot Simba Nala Toby Daisy Lucky".split()

CITIES = """London Paris Berlin Rome Madrid Vienna Oslo Tokyo Delhi Lima Cairo Boston Chicago Toronto Sydney Munich Hamburg Zurich
Geneva Lisbon Dublin Prague Warsaw Athens Moscow Beijing Seoul Mumbai Lagos Nairobi Seattle Denver Austin Bern Milan Lyon""".split()

COUNTRIES = """France Germany Spain Italy Japan China India Brazil Canada Mexico Kenya Egypt Norway Sweden Poland Russia Peru Chile
Australia Austria Switzerland Portugal Greece Turkey Iran Iraq Ghana Cuba Ireland England Scotland Denmark Finland""".split()

VALUES = {
    "favourite colour": "red blue green yellow black white orange purple pink brown grey turquoise".split(),
    "favourite food": "pizza pasta rice bread soup cheese salad apples sushi curry chocolate noodles".split(),
    "favourite animal": "cat dog horse elephant tiger bird fish bear wolf owl rabbit penguin".split(),
    "favourite language": "Rust Python SQL C Java Go Haskell Lisp Swift Ruby".split(),
    "favourite number": [str(n) for n in range(1, 100)],
    "favourite drink": "tea coffee water milk juice lemonade cocoa".split(),
    "favourite season": "spring summer autumn winter".split(),
    "favourite sport": "tennis football chess swimming running hockey skiing climbing".split(),
    "favourite city": CITIES,
    "dog's name": PETS,
    "cat's name": PETS,
    "sister's name": NAMES,
    "brother's name": NAMES,
    "friend's name": NAMES,
    "mother's name": NAMES,
    "age": [str(n) for n in range(12, 80)],
    "job": "developer teacher student engineer doctor writer designer cook farmer musician nurse driver".split(),
    "hobby": "reading painting cooking hiking chess music gardening dancing photography cycling".split(),
    "lucky number": [str(n) for n in range(1, 1000)],
    "city": CITIES,
}

PEOPLE = """Albert Einstein|Isaac Newton|Napoleon|Shakespeare|Mozart|Cleopatra|Julius Caesar|Barack Obama|Elon Musk|Bill Gates|Ada Lovelace
Alan Turing|Marie Curie|Leonardo da Vinci|the president|the king|the pope|Linus Torvalds|Guido van Rossum|Steve Jobs|Picasso|Beethoven
Taylor Swift|Messi|Gandhi|Darwin|Plato|Socrates|Galileo|Donald Trump|Angela Merkel|my neighbour|Harry Potter|Batman|Sherlock Holmes
Michael Jackson|Madonna|the queen|the prime minister|Nikola Tesla|Mark Twain|Homer|Aristotle|Bach|Freud|Kant|Hegel|Tolstoy""".replace(
    "\n", "|"
).split("|")

THINGS = """the moon|the sun|a star|gravity|light|water|fire|ice|gold|iron|oxygen|DNA|a cell|a virus|evolution|a volcano|an earthquake
democracy|money|inflation|the economy|a bank|a tax|history|the war|the past|the future|time|space|a black hole|an atom|an electron
quantum physics|relativity|chemistry|biology|geography|philosophy|psychology|religion|music|jazz|rock|opera|a piano|a guitar|a violin
football|tennis|chess|poker|basketball|swimming|yoga|a car|a train|a plane|a bicycle|a ship|a rocket|a bridge|a house|a castle|a city
a river|the ocean|a mountain|a forest|a desert|an island|the weather|rain|snow|a cloud|wind|a storm|summer|winter|an apple|a banana
bread|cheese|chocolate|coffee|tea|wine|beer|pizza|sushi|rice|sugar|salt|a cat|a dog|a horse|an elephant|a whale|a shark|a spider|a bee
a bird|a dinosaur|a tree|a flower|a rose|a mushroom|the heart|the brain|a bone|blood|sleep|a dream|love|fear|happiness|a joke|art
a painting|a film|a book|a novel|a poem|theatre|photography|fashion|a diamond|a king|a pirate|a robot|a dragon|a ghost|magic|Bitcoin
blockchain|a phone|a camera|a television|a fridge|electricity|a battery|solar power|nuclear power|oil|plastic|steel|glass|paper
Java|Haskell|C++|Go|JavaScript|TypeScript|Ruby|Perl|PHP|Swift|Kotlin|Lisp|Prolog|Fortran|COBOL|Erlang|Elixir|Scala|MATLAB|Kubernetes
Docker|AWS|Windows|macOS|Android|an iPhone|Excel|Photoshop|Minecraft|React|Angular|Vue|Django|Flask|Rails|Spring|Hadoop|Spark|Kafka
MongoDB|Redis|Oracle|Cassandra|Neo4j|GraphQL|OAuth|TCP|DNS|HTTP|HTTPS|a router|a firewall|a VPN|Wi-Fi|Bluetooth|5G|tokio|actix|rayon
pandas|matplotlib|scipy|a monad|a functor|a semaphore|a coroutine|a mutex in Java|a monoid|lambda calculus|the halting problem|P versus NP
Taylor series|an integral|a derivative|calculus|algebra|geometry|trigonometry|a prime number|pi|infinity|zero|a triangle|a circle|topology
the Roman Empire|the Middle Ages|the Cold War|ancient Egypt|the French Revolution|the Bible|Buddhism|karate|ballet|cricket|golf|skiing
cancer|diabetes|a vaccine|vitamin C|protein|a calorie|a marathon|the Olympics|the World Cup|Mars|Jupiter|Saturn|Pluto|a comet|NASA""".replace(
    "\n", "|"
).split("|")

LIKED = """dogs cats music pizza tea coffee books football chess trains rain snow summer winter flowers films games birds cheese bread
mathematics art history mountains apples bananas jazz dancing cooking cars robots spiders Mondays weekends Rust Python""".split()

CHORES = """cook pasta|bake a cake|fix my car|fly a plane|make coffee|repair a bicycle|paint a house|play the guitar|learn French|train a dog
plant a tree|build a house|write a novel|win at chess|lose weight|sleep better|make money|buy a house|send an email|draw a circle
connect to a printer|make a website|build a robot|train a neural network|deploy to the cloud|set up a server|make a video game
write an operating system|write a compiler|encrypt a file|make a chart|plot a graph|read a PDF file|open an Excel file|record sound
scan a document|resize an image|send a message to a phone|mine Bitcoin|write a web server|scrape a website|use Docker|use Kubernetes
make an app|convert a video|burn a disk|tune an engine|tie a tie|fold a shirt|remove a stain|grow tomatoes|make a bow|ride a horse
simulate a galaxy|render a triangle|compress a video|solve a maze|parse HTML|make a chatbot|detect a face|translate a book""".replace(
    "\n", "|"
).split("|")

OPPOSITES = """big small|hot cold|up down|left right|black white|day night|fast slow|good bad|old new|high low|open closed|long short
happy sad|full empty|light dark|rich poor|strong weak|early late|hard easy|true false|first last|inside outside|start end|yes no|in out
before after|on off|loud quiet|wet dry|clean dirty|young old|more less""".replace("\n", "|").split("|")

SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "lion": "roar", "bee": "buzz"}
LEGS = {"dog": 4, "cat": 4, "horse": 4, "bird": 2, "human": 2, "spider": 8, "ant": 6, "bee": 6, "fish": 0, "snake": 0, "cow": 4, "table": 4}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

SYSTEMS = """You are a helpful assistant.
You are a helpful assistant
You are demo-chat, a tiny demo model of lowbit.
Be brief.
Answer briefly.
You are a friendly chatbot.
You are a helpful AI assistant. Answer the user's questions.
Answer in short sentences.
Be kind and honest.
You are an expert programmer.
You help users with Rust, Python and SQL.""".split("\n")
